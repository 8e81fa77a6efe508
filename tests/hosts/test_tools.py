"""Bench and probe on two hosts as they are found: Debian's hosts file, one short hostname, clocks an hour apart."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
TOOL = [sys.executable, "-m", "trtllm_pp_progress"]
SHORT = ["--name", "node.rack%"]
LIMIT_S = 100
DELAY_MS = 20
OPEN_MPI = (
    "Open MPI"
    in subprocess.run(
        [Path(sys.executable).with_name("mpirun"), "--version"], capture_output=True, text=True, check=False, timeout=60
    ).stdout
)


def test_the_bench_measures_across_hosts(hosts, tmp_path):
    """Under its own launcher: a table, where ranks run, and parked times that know of the delay between the hosts."""
    path = tmp_path / "bench.json"
    options = ["--pp", 4, "--transport", "default", "--policies", "regressed,flush,patched", "--json", path]
    options += ["--repeat", 1, "--steps", 10, "--payload", 100_000, "--reentry-ms", 50]
    done = hosts(2, *TOOL, "bench", *options, options=[*SHORT, "--delay", DELAY_MS], limit=LIMIT_S)
    assert done.returncode == 0, done.stdout
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["environment"]["ranks"] == "0/1 on node.rack1; 2/3 on node.rack2"
    assert "ranks 0/1 on node.rack1; 2/3 on node.rack2" in " ".join(done.stdout.split())
    assert "clocks differ" in done.stdout
    assert [floor["ranks"] for floor in written["floor"]] == [[1, 2]]
    assert written["floor"][0]["buffers_ms_p50"] > DELAY_MS
    for row in written["rows"]:
        assert row["wrong"] == 0
        assert row["clock_error_ms"] > DELAY_MS  # half a round trip
        for run in row["raw"]:
            errors = [rank["clock_error_ms"] for rank in run["ranks"]]
            assert [error > DELAY_MS for error in errors] == [True, False, True, False]  # from 3 to 0, from 1 to 2
            for rank in (0, 2):
                # Not a whole delay: how far apart the clocks are is known to a few milliseconds.
                assert min(run["ranks"][rank]["parked_ms"]) > DELAY_MS / 2
                assert max(run["ranks"][rank]["parked_ms"]) < LIMIT_S * 1e3


def test_the_bench_takes_the_network_that_it_is_told(hosts):
    """One that no host has leads nowhere, and that is said."""
    options = ["--pp", 2, "--transport", "default", "--policies", "flush", "--repeat", 1, "--steps", 10]
    bed = [*SHORT, "--slots", 1]
    refused = hosts(2, *TOOL, "bench", *options, "--network", "10.78.0.0/24", options=bed)
    assert refused.returncode == 1, refused.stdout
    assert "rank 1 cannot be reached beside MPI: tried no address" in refused.stdout
    done = hosts(2, *TOOL, "bench", *options, "--network", "10.77.0.0/24", options=bed)
    assert done.returncode == 0, done.stdout


def probed(hosts, path, *options, before=(), bed=SHORT):
    """Run the probe on four ranks of two hosts; return the job and what it wrote."""
    line = [*TOOL, "probe", "--ranks", 4, "--transport", "default", "--sizes", "4096,1000000", "--json", path]
    done = hosts(2, *before, *line, *options, options=bed, limit=LIMIT_S)
    return done, json.loads(path.read_text(encoding="utf-8"))


def test_the_probe_tells_hosts_by_their_memory(hosts, tmp_path):
    """Four kinds of links between two hosts, also where both have one name, which Open MPI cannot live with."""
    bed = SHORT if OPEN_MPI else ["--name", "node"]
    first, second = ("node.rack1", "node.rack2") if OPEN_MPI else ("node (from rank 0)", "node (from rank 2)")
    done, written = probed(hosts, tmp_path / "probe.json", bed=bed)
    links = written["runs"][0]["links"]
    assert [(link["sender"], link["receiver"], link["hosts"]) for link in links] == [
        (0, 1, [first, first]),
        (1, 2, [first, second]),
        (2, 3, [second, second]),
        (3, 0, [second, first]),
    ]
    moves = [row["moves"] for link in links for row in link["rows"]]
    assert done.returncode == written["exit_code"] == (0 if all(moves) else 1), done.stdout
    assert moves[0]
    if OPEN_MPI:  # its TCP parks (tests/launch)
        parks = [[row["moves"] for row in link["rows"]].count(False) for link in links]
        assert parks[1] > 0
        assert parks[3] > 0
        assert done.returncode == 1
    assert f"{first} to {second}" in done.stdout


def test_a_network_that_the_hosts_do_not_share_is_hinted_at(hosts, tmp_path):
    """Both have a docker0 of one address, and MPI takes it: exit code 2 in time, and what to set."""
    taken = {} if OPEN_MPI else {"UCX_NET_DEVICES": "docker0"}
    path = tmp_path / "probe.json"
    line = [*TOOL, "probe", "--transport", "default", "--sizes", 4096, "--step-timeout", 10, "--json", path]
    command = ["bash", SCRIPTS / "docker0.sh", *line]
    done = hosts(2, *command, options=["--slots", 1], limit=LIMIT_S, **taken)
    assert done.returncode == 2, done.stdout
    assert "name a network that they share (here: docker0, docker1, eth0)" in done.stdout
    assert "UCX_NET_DEVICES=NAME" in done.stdout
    named = {"OMPI_MCA_btl_tcp_if_include": "eth0"} if OPEN_MPI else {"UCX_NET_DEVICES": "eth0"}
    done = hosts(2, *command, options=["--slots", 1], limit=LIMIT_S, **named)
    assert done.returncode in (0, 1), done.stdout

"""The bed of hosts itself: what a host has to itself, what the network adds, and that nothing is left behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from beds import CANNOT, LIMIT_S, NOT_ROOT, environment, line
from jobs import OUTPUT, ROOT

SCRIPTS = Path(__file__).parent / "scripts"
HOUR_S = 3600
IP = os.path.realpath(shutil.which("ip", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") or "/usr/sbin/ip")


def lines(done):
    """Return the lines that a job that went well has printed, but for its launcher's own."""
    assert done.returncode == 0, done.stdout
    return [text for text in done.stdout.splitlines() if not text.startswith("[")]


def said(done):
    """Return what a job that went well has said, each line in JSON."""
    return [json.loads(text) for text in lines(done)]


@pytest.fixture(params=[(), NOT_ROOT], ids=["as we are", "not as root"])
def user(request):
    """Return what runs a command as we are, and once more without root."""
    return request.param


def described(hosts, number, ranks, **how):
    """Return what each rank of an mpirun says of its host, by name."""
    # Not `hostname`: ranks that end at once, without MPI, make Open MPI's mpirun hang now and then.
    done = hosts(number, "mpirun", "-n", ranks, sys.executable, SCRIPTS / "describe.py", **how)
    return sorted(said(done), key=lambda report: report["name"])


def test_each_host_is_one(hosts, user):
    """Name, address, hosts file, shared memory and clock are its own, and the ranks of mpirun are spread over them."""
    found = described(hosts, 3, 6, before=user)
    assert [report["name"] for report in found] == [f"host{number}" for number in (1, 1, 2, 2, 3, 3)]
    for report in found:
        assert report["interfaces"] == ["eth0", "lo"]
        assert report["address"] == f"10.77.0.{report['name'][-1]}"
        assert report["own address by name"] == "127.0.1.1"
        assert report["others by name"] == []
        assert report["seen in shared memory"] == 2, "those of one host share it, and they alone"
    clocks = [report["monotonic"] for report in found[::2]]
    for number, clock in enumerate(clocks):
        assert abs(clock - clocks[0] - number * HOUR_S) < LIMIT_S


def test_slots_say_how_many_ranks_a_host_takes_and_a_name_may_be_short_for_several(hosts):
    """Ranks go to the next host once one is full; node.rack1 and node.rack2 are both node for short."""
    found = described(hosts, 2, 4, options=["--slots", 3, "--name", "node.rack%"])
    assert [report["name"] for report in found] == ["node.rack1"] * 3 + ["node.rack2"]


def test_another_host_is_entered_as_by_ssh(hosts):
    """A login's variables are there, those of the command are not."""
    shell = "export BESIDES=1; $HOSTS_ENTER -x 10.77.0.2 'hostname; echo $BESIDES/$TMPDIR'; echo $(hostname) $BESIDES"
    assert hosts(2, "sh", "-c", shell).stdout.split("\n") == ["host2", "//dev/shm/tmp", "host1 1", ""]


def test_the_command_is_run_as_it_would_be_without_hosts(hosts):
    """Its arguments, its folder, its variables, its exit code."""
    code = "import os, sys; print(sys.argv[1:], os.getcwd(), os.environ['BESIDES']); sys.exit(3)"
    done = hosts(1, sys.executable, "-c", code, "a b", "$c", "--", "'", BESIDES="1")
    assert (done.returncode, done.stdout) == (3, f"{['a b', '$c', '--', chr(39)]} {ROOT} 1\n")


@pytest.mark.parametrize(
    ("options", "least_ms"), [([], 0), (["--delay", 5], 10), (["--delay", 1, "--rate", 10], 2 + 2 * 0.8)]
)
def test_delay_and_rate_are_added(hosts, user, options, least_ms):
    """1,000 bytes there and back, 20 times: each takes at least twice the delay and the time at that rate."""
    (found,) = said(hosts(2, sys.executable, SCRIPTS / "echo.py", 1000, 20, options=options, before=user))
    assert found["lost"] == 0
    assert min(found["ms"]) >= least_ms


def test_loss_loses(hosts):
    """Of 1,000 datagrams and their echoes 19 % are lost in the mean at 10 % each way: 100 and 300 are far from it."""
    (found,) = said(hosts(2, sys.executable, SCRIPTS / "echo.py", 100, 20, options=["--loss", 10]))
    assert found["sent"] == 1000
    assert 100 <= found["lost"] <= 300


@pytest.mark.parametrize("options", [[], ["--delay", 1]], ids=["bridge", "switch"])
def test_a_link_can_be_cut_and_mended(hosts, options):
    """From the switch, while the hosts go on."""
    assert said(hosts(2, sys.executable, SCRIPTS / "cut.py", options=options)) == [{"reached": [True, False, True]}]


def processes(marker):
    """Return the processes that were started with an argument, in whatever namespace."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if marker.encode() in arguments:
            found.append(int(entry.name))
    return found


def await_count(marker, most, fewest=0):
    """Wait until so many such processes are there."""
    limit = time.monotonic() + LIMIT_S
    while not fewest <= len(processes(marker)) <= most:
        assert time.monotonic() < limit, processes(marker)
        time.sleep(0.02)


@pytest.mark.parametrize("end", ["SIGTERM", "SIGINT", "SIGHUP", "SIGKILL"])
def test_nothing_is_left_however_it_ends(possible, user, end):
    """Processes on each host, interfaces and mounts: as before. That they were there is the control."""
    marker = f"{time.time_ns() % 10**9}.5"  # seconds for sleep, and nobody else's
    before = (Path("/proc/self/mounts").read_text(), sorted(os.listdir("/sys/class/net")))
    shell = f"$HOSTS_ENTER 2 'exec sleep {marker}' & exec sleep {marker}"
    arguments = line(2, "sh", "-c", shell, options=["--delay", 1], before=user)
    job = subprocess.Popen(arguments[3:], cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)
    await_count(marker, 2, 2)
    job.send_signal(signal.Signals[end])
    job.wait(LIMIT_S)
    await_count(marker, 0)
    assert (Path("/proc/self/mounts").read_text(), sorted(os.listdir("/sys/class/net"))) == before


def refused(shell, *arguments):
    """Run ci/hosts.sh in namespaces in which `shell` has taken something away."""
    inner = f"{shell}; exec bash ci/hosts.sh 2 -- true"
    own = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", inner]
    return subprocess.run([*own, *arguments], cwd=ROOT, env=environment(), timeout=LIMIT_S, **OUTPUT)


@pytest.mark.parametrize(
    ("shell", "named"),
    [
        (f"mount --bind /dev/null {IP}", "apt-get install iproute2"),
        ("echo 0 >/proc/sys/user/max_net_namespaces", "namespaces are refused"),
        ("echo 3 >/proc/sys/user/max_mnt_namespaces", "unshare"),
    ],
    ids=["no ip", "no namespaces", "too few namespaces"],
)
def test_what_the_machine_lacks_is_said_in_one_line(possible, shell, named):
    """And the exit code tells it from a failure of the command."""
    done = refused(shell)
    assert done.returncode == CANNOT, done.stdout
    assert done.stdout.startswith("ci/hosts.sh: no hosts can be made here: ")
    assert named in done.stdout
    assert done.stdout.count("\n") == 1


def test_with_nothing_taken_away_it_runs_there(possible):
    """Control."""
    assert refused("true").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "N is ''"),
        (["0", "--", "true"], "N is '0'"),
        (["2", "true"], "unknown option 'true'"),
        (["2", "--"], "there is no COMMAND"),
        (["2", "--loss", "much", "--", "true"], "--loss is 'much'"),
        (["2", "--delay", "-1", "--", "true"], "--delay is '-1'"),
        (["2", "--name", "a b", "--", "true"], "--name is 'a b'"),
    ],
)
def test_bad_input_names_itself(arguments, named):
    """With the usage, and exit code 2."""
    done = subprocess.run(["bash", "ci/hosts.sh", *arguments], cwd=ROOT, timeout=LIMIT_S, **OUTPUT)
    assert done.returncode == 2
    assert named in done.stdout
    assert "usage: ci/hosts.sh N" in done.stdout

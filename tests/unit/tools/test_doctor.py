"""The doctor's judgements: pure functions of what was found, so every host's report can be made here."""

import copy
import io
import json
import math
import queue
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from doubles.eras import ERAS, PATCHED, executor_class
from rich.console import Console

from trtllm_pp_progress.pyexecutor.shape import examine, recognise
from trtllm_pp_progress.settings.core import PUMP_PERIOD as PUMP
from trtllm_pp_progress.tools.doctor import EXIT_CODES
from trtllm_pp_progress.tools.doctor import launcher as _launcher
from trtllm_pp_progress.tools.doctor.findings import KINDS, findings, verdict
from trtllm_pp_progress.tools.doctor.kinds import SEVERITIES, rows
from trtllm_pp_progress.tools.doctor.launcher import look_at_launcher
from trtllm_pp_progress.tools.doctor.layer import select
from trtllm_pp_progress.tools.doctor.machine import environment, package
from trtllm_pp_progress.tools.doctor.mpi import MESSAGES, holds_gil
from trtllm_pp_progress.tools.doctor.on_transport import threshold
from trtllm_pp_progress.tools.doctor.screen import render
from trtllm_pp_progress.tools.doctor.transport import judge
from trtllm_pp_progress.tools.doctor.ucx import parse_config, parse_resources
from trtllm_pp_progress.tools.job.library import Library

UCX = {
    "version": "1.20.1",
    "library": "/lib/libucp.so.0",
    "thread_safe": True,
    "tls": "tcp,self",
    "rndv_thresh": "intra:auto,inter:auto",
    "rndv_scheme": "auto",
    "found": ["self", "tcp"],
    "found_without_tls": ["self", "tcp"],
    "others_loaded": [],
    "others_installed": [],
}
UNPATCHED = {
    "version": "1.3.0rc20",
    "state": "ok",
    "error": None,
    "era": "E2",
    "action": "patch",
    "reason": "sends are parked",
    "relay_waits": False,
    "pumped": False,
    "patched": False,
    "patches": ["PyExecutor.send_handles"],
}
LAUNCHER = ("said", "name", "rank", "size", "unset", "path", "made_by", "problem")
MOVES = {"verdict": "move", "parks_from": None, "carrier": "memory"}
RANK = {"said": "PMI_RANK=0, PMI_SIZE=2", "name": "MPICH's mpiexec", "rank": 0, "size": 2, "unset": "env -u PMI_RANK"}
PARKED = {"verdict": "park", "parks_from": 65536, "carrier": "memory"}
ABSENT = dict.fromkeys(UNPATCHED) | {"state": "absent"}


def judged(found):
    """Return what the doctor's child tells of a verdict on a class."""
    named = {name: getattr(found, name) for name in ("era", "reason", "relay_waits", "pumped")}
    return named | {"action": found.action.value}


def report(transport=None, **changes):
    """Return the facts of a host with UCX over TCP and an affected TensorRT-LLM, with sections or values changed."""
    facts = {
        "schema": 1,
        "package": {
            "version": "0.1.0",
            "python": "3.11.7",
            "switch": None,
            "settings": {},
            "problems": [],
            "gate": True,
            "native": True,
            "native_error": None,
        },
        "tensorrt_llm": copy.deepcopy(UNPATCHED),
        "mpi": {
            "state": "ok",
            "error": None,
            "vendor": "Open MPI",
            "version": "5.0.11",
            "library": "Open MPI v5.0.11",
            "libmpi": "/lib/libmpi.so.40",
            "mpi4py": "4.1.3",
            "thread_level": "MULTIPLE",
            "gil_held_duplicate": False,
            "messages": [],
            "lines": {},
        },
        "launcher": {**dict.fromkeys(LAUNCHER), "path": "/bin/mpirun", "made_by": "Open MPI"},
        "transport": over("pml ucx", "self", "tcp") if transport is None else transport,
        "cores": {"allowed": 8, "online": 8, "quota": None, "later": None, "ranks": 1, "threads": 3},
        "surroundings": {
            "lost_paths": {},
            "pmix_folder_missing": None,
            "memlock_bytes": None,
            "shm_bytes": 8 << 30,
            "single_copy": "works",
        },
        "environment": {},
    }
    for section, values in changes.items():
        facts[section] = {**facts[section], **values}
    return facts


def over(layer, *found, measured=None, provider=None, **ucx):
    """Return the transport section of a layer with transports."""
    own = {**UCX, "found": list(found), **ucx}
    why_not = None if measured else "it was told not to"
    judged = judge(layer, list(found), own, provider, measured)
    return {**judged, "measured": measured, "not_measured": why_not, "ucx": own}


def written(facts):
    """Return the findings as a report has them."""
    return [finding.written() for finding in findings(facts)]


def ids(facts):
    """Return the ids of the findings that are more than information."""
    return [finding["id"] for finding in written(facts) if finding["severity"] != "info"]


# The verdict


@pytest.mark.parametrize(
    ("facts", "word", "said"),
    [
        (report(), "affected", "and the relay of TensorRT-LLM's era E2 is not patched"),
        (report(tensorrt_llm=ABSENT), "affected", "UCX over tcp parks"),
        (report(tensorrt_llm={"patched": True}), "cured", "UCX over tcp"),
        (report(tensorrt_llm={"patched": True}, mpi={"thread_level": "SERIALIZED"}), "affected", "THREAD_SERIALIZED"),
        (report(tensorrt_llm={"patched": True, "pumped": True}, environment={PUMP: "5"}), "cured", "UCX over tcp"),
        (report(tensorrt_llm={"patched": True, "pumped": True}, environment={PUMP: "-1"}), "affected", f"{PUMP} turns"),
        (report(tensorrt_llm={"patched": True, "era": "E2"}, environment={PUMP: "0"}), "cured", "UCX over tcp"),
        (report(tensorrt_llm={"patched": True}, environment={"TLLM_DISABLE_MPI": "1"}), "unknown", "torch.distributed"),
        (report(tensorrt_llm={"era": "unknown", "action": "stand down", "reason": "odd"}), "unknown", "odd"),
        (report(tensorrt_llm={**ABSENT, "state": "failed", "error": "no libcuda"}), "unknown", "no libcuda"),
        (report(over("pml ucx", "posix", "sysv", "self")), "fine", "UCX over posix"),
        (report(over("pml ucx", "cma", "posix", "self")), "affected", "UCX over cma"),
        (report(over("pml ucx", "rc_mlx5", "posix", "tcp", "self")), "unknown", "rc_mlx5"),
        (report(over("pml ucx", "cma", "self", measured=MOVES)), "fine", "within a host they move, measured"),
        (report(over("pml ucx", "posix", "self", measured=PARKED)), "affected", "within a host they park, measured"),
        (report(over("pml ucx", "cma", "tcp", "self", measured=MOVES)), "affected", "between hosts they park, by the"),
        (report(over("netmod ofi", provider="tcp", measured=MOVES)), "unknown", "netmod ofi over libfabric tcp"),
        (report(over("pml ob1", "self", "sm", "tcp")), "affected", "pml ob1 over sm and tcp"),
        (report(over("pml cm")), "unknown", "pml cm"),
        (report(over(None)), "unknown", "unknown"),
        (report(mpi={"state": "timed out", "error": "no answer", "thread_level": None}), "unknown", "no answer"),
        (report(mpi={"state": "absent", "error": "No module", "thread_level": None}), "unknown", "No module"),
    ],
)
def test_the_verdict(facts, word, said):
    """Affected on UCX over TCP, by that name; cured where a worker is patched; unknown where it cannot be told."""
    found, reason = verdict(facts, findings(facts))
    assert found == word
    assert said in reason


@pytest.mark.parametrize("era", ERAS)
def test_the_verdict_on_each_era_as_it_is_recognised(era):
    """Nothing is parked in the oldest ones, and the names are those that recognise() gives."""
    found = recognise(executor_class(era))
    facts = report(tensorrt_llm=judged(found))
    word, reason = verdict(facts, findings(facts))
    assert word == ("affected" if era in PATCHED else "fine")
    assert f"era {era}" in reason


@pytest.mark.parametrize("era", PATCHED)
def test_a_pump_that_is_off_is_no_cure_where_our_drive_is_off_too(era):
    """Era by era, H and I among them: cured is said exactly where examine() lets the idle relay thread drive."""
    found = recognise(executor_class(era))
    without = SimpleNamespace(executed_batch_queue=queue.Queue(), _pp_mpi_progress=None)
    facts = report(tensorrt_llm=judged(found) | {"patched": True}, environment={PUMP: "0"})
    word, _ = verdict(facts, findings(facts))
    assert (word == "cured") == examine(without, found).drives
    assert (word == "cured") == (era not in ("H", "I"))


def test_exit_codes_are_the_documented_ones():
    """0 fine or cured, 1 affected, 2 cannot tell."""
    assert EXIT_CODES == {"fine": 0, "cured": 0, "affected": 1, "unknown": 2}


# Transports


@pytest.mark.parametrize(
    ("layer", "found", "within", "between", "parks"),
    [
        ("pml ucx", ["self", "tcp"], "tcp", "tcp", "yes"),
        ("pml ucx", ["cma", "posix", "self", "sysv", "tcp"], "cma", "tcp", "yes"),
        ("pml ucx", ["posix", "self", "rc_mlx5", "tcp", "ud_mlx5"], "posix", "rc_mlx5", "unknown"),
        ("pml ucx", ["cuda_copy", "cuda_ipc", "posix", "self"], "posix", None, "no"),
        ("netmod ucx", ["posix", "self", "tcp"], None, "tcp", "yes"),
        ("pml ob1", ["self", "sm", "tcp"], "sm", "tcp", "yes"),
        ("netmod ofi", [], None, "libfabric", "unknown"),
        ("fabrics shm:ofi", [], None, "libfabric", "unknown"),
        ("fabrics shm", [], None, None, "unknown"),
    ],
)
def test_the_transport_that_is_used_is_the_preferred_one(layer, found, within, between, parks):
    """Within a node and between nodes; what is installed and not used does not count."""
    judged = judge(layer, found, {"found": found})
    assert (judged["within_node"], judged["between_nodes"], judged["parks"]) == (within, between, parks)


def test_ucx_that_is_loaded_and_not_used_does_not_count():
    """Open MPI links UCX even where it sends by ob1."""
    judged = judge("pml ob1", ["self", "sm"], {"found": ["self", "tcp"]})
    assert judged["found"] == ["self", "sm"]
    assert "UCX" not in judged["carrier"]


@pytest.mark.parametrize(
    ("vendor", "library", "stderr", "environ", "layer"),
    [
        ("Open MPI", "Open MPI v5", "[h:1] select: component ucx selected\n", {}, "pml ucx"),
        ("Open MPI", "Open MPI v5", "select: component ob1 selected\n", {}, "pml ob1"),
        ("Open MPI", "Open MPI v5", "", {}, None),
        ("MPICH", "MPICH Device:       ch4:ofi\n", "", {}, "netmod ofi"),
        ("MPICH", "MPICH Device:       ch4:ucx ofi\nMPICH x", "", {}, "netmod ucx"),
        ("MPICH", "MPICH Device:\tch4:ucx,ofi", "", {"MPIR_CVAR_CH4_NETMOD": "ofi"}, "netmod ofi"),
        ("Intel MPI", "Intel(R) MPI Library 2021", "", {}, "fabrics shm:ofi"),
        ("Intel MPI", "Intel(R) MPI Library 2021", "", {"I_MPI_FABRICS": "ofi"}, "fabrics ofi"),
        ("MVAPICH", "MVAPICH Version 4.0", "", {}, None),
    ],
)  # fmt: skip
def test_the_layer_is_the_one_in_use(vendor, library, stderr, environ, layer):
    """From what Open MPI says when it selects, and from MPICH's device."""
    assert select(vendor, library, stderr, environ)["layer"] == layer


@pytest.mark.parametrize(
    ("printed", "provider"),
    [
        ("libfabric provider: sockets - 192.0.2.0/24\n", "sockets"),
        ("[0] MPI startup(): libfabric provider: tcp\n", "tcp"),
        ("provider: tcp;ofi_rxm, score = 4\nlibfabric provider: verbs;ofi_rxm - mlx5_0\n", "verbs;ofi_rxm"),
        ("provider: efa, score = 4\n", None),
    ],
)
def test_case_79_the_provider_is_the_one_that_was_chosen(printed, provider):
    """MPICH lists those that there are before."""
    assert select("MPICH", "MPICH Device: ch4:ofi", printed, {})["provider"] == provider


def test_what_ucx_prints_is_understood():
    """Its configuration, and the resources of a context: each transport once."""
    printed = "UCX_NET_DEVICES=all\nUCX_TLS=tcp,self\nUCX_RNDV_THRESH=intra:auto,inter:8K\nUCX_RNDV_SCHEME=put_zcopy\n"
    assert parse_config(printed) == {
        "tls": "tcp,self",
        "rndv_thresh": "intra:auto,inter:8K",
        "rndv_scheme": "put_zcopy",
    }
    text = (
        "#     component 1  :  tcp\n#            md 1  :  component 1  tcp \n"
        "#      resource 0  :  md 0  dev 0  flags -- self/memory\n"
        "#      resource 1  :  md 1  dev 1  flags -- tcp/eth0\n"
        "#      resource 2  :  md 1  dev 2  flags -- tcp/lo\n"
        "#      resource 3  :  md 4  dev 3  flags -- rc_mlx5/mlx5_0:1\n"
    )
    assert parse_resources(text) == ["rc_mlx5", "self", "tcp"]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("auto", {"all": None}),
        ("inf", {"all": math.inf}),
        ("0", {"all": 0}),
        ("1", {"all": 1}),
        ("8k", {"all": 8192}),
        ("8KB", {"all": 8192}),
        ("8192b", {"all": 8192}),
        ("1m", {"all": 1 << 20}),
        ("intra:auto,inter:64k", {"intra": None, "inter": 65536}),
    ],
)
def test_each_form_of_the_rendezvous_threshold(text, values):
    """In bytes; None is UCX's own choice."""
    assert threshold(text) == values


@pytest.mark.parametrize("text", ["", "many", "-1", "8q", "inter:", "nan"])
def test_what_is_no_threshold_is_refused(text):
    """It names itself and the valid ones."""
    with pytest.raises(ValueError, match=f"^{re.escape(repr(text))} is no size: valid ones are like auto"):
        threshold(text)


# Findings


@pytest.mark.parametrize(
    ("facts", "finding"),
    [
        (report(mpi={"state": "absent", "thread_level": None}), "mpi-absent"),
        (report(mpi={"state": "failed", "error": "no libmpi", "thread_level": None}), "mpi-failed"),
        (report(mpi={"state": "crashed", "error": "ended by SIGSEGV", "thread_level": None}), "mpi-crashed"),
        (report(mpi={"state": "timed out", "error": "no answer", "thread_level": None}), "mpi-timeout"),
        (report(mpi={"state": "crashed", "error": "ended by SIGSEGV"}), "ucx-unasked"),
        (report(mpi={"thread_level": "FUNNELED"}), "thread-level"),
        (report(mpi={"gil_held_duplicate": True}), "mpi4py-gil"),
        (report(mpi={"messages": ["ucx-not-thread-safe"]}), "ucx-not-thread-safe"),
        (report(over("pml ob1", "tcp", thread_safe=False)), "ucx-not-thread-safe"),
        (report(mpi={"lines": {"ucp-worker": "Failed to create UCP worker"}}), "ucp-worker"),
        (report(mpi={"lines": {"ucx-endpoint": "no endpoint"}}), "ucx-endpoint"),
        (report(mpi={"lines": {"ucx-not-available": "network device 'x' is not available"}}), "ucx-not-available"),
        (report(mpi={"lines": {"cray-gtl": "GTL library is not linked"}}), "cray-gtl"),
        (report(mpi={"lines": {"slurm-pmi": "OMPI was not built with SLURM's PMI support"}}), "slurm-pmi"),
        (report(surroundings={"pmix_folder_missing": "/var/spool/pmix"}), "pmix-unreachable"),
        (report(surroundings={"single_copy": "EPERM"}), "cma-denied"),
        (report(environment={"OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile"}), "old-settings"),
        (report(environment={"FI_PROVIDER": "efa"}), "provider-other"),
        (report(over("netmod ofi", provider="tcp"), environment={"FI_PROVIDER": "efa"}), "provider-other"),
        (report(mpi={"state": "off", "error": "off", "thread_level": None}), "mpi-off"),
        (report(surroundings={"lost_paths": {"OPAL_PREFIX": "/nonexistent"}}), "lost-path"),
        (report(environment={"PMIX_MCA_psec": "munge"}), "pmix-settings"),
        (report(surroundings={"memlock_bytes": 65536}), "memlock"),
        (report(surroundings={"shm_bytes": 64 << 20}), "small-shm"),
        (report(launcher=RANK | {"problem": "mismatch"}), "launcher-mismatch"),
        (report(launcher=RANK | {"problem": "tasks"}), "slurm-singletons"),
        (report(launcher=RANK | {"problem": "alone"}), "launcher-alone"),
        (report(launcher={"problem": "other", "made_by": "MPICH"}), "launcher-other"),
        (report(over("pml ucx", "tcp", measured=PARKED)), "measured"),
        (report(), "not-measured"),
        (report(over("pml ucx", "cma", rndv_scheme="put_zcopy")), "rndv-scheme"),
        (report(over("pml ucx", "self", "tcp", found_without_tls=["cma", "rc_mlx5", "self", "tcp"])), "tcp-forced"),
        (report(over("pml ucx", "tcp", others_loaded=["/nixl.libs/libucp-2be8eb38.so.0"])), "ucx-copies"),
        (report(cores={"allowed": 2, "later": 8}), "mask-cleared"),
        (report(), "transport-parks"),
        (report(over("pml cm")), "transport-unknown"),
        (report(over("pml ob1", "tcp"), environment={"UCX_TLS": "tcp"}), "ucx-unused"),
        (report(over("pml ucx", "tcp", rndv_thresh="inf")), "rndv-threshold"),
        (report(over("pml ucx", "tcp", rndv_thresh=None), environment={"UCX_RNDV_THRESH": "x"}), "rndv-threshold"),
        (report(tensorrt_llm=ABSENT), "upstream-absent"),
        (report(tensorrt_llm={**ABSENT, "state": "timed out", "error": "no answer"}), "upstream-failed"),
        (report(tensorrt_llm={"patched": True}), "upstream-patched"),
        (report(), "upstream-unpatched"),
        (report(tensorrt_llm={"action": "stand down"}), "upstream-left"),
        (report(tensorrt_llm={"pumped": True, "patched": True}, environment={PUMP: "0"}), "pump-off"),
        (report(package={"problems": ["TRTLLM_PP_PROGRESS='x' is not valid: 1 or 0"]}), "setting"),
        (report(package={"switch": False}), "switch-off"),
        (report(package={"gate": False}), "no-gate"),
        (report(package={"native": False, "native_error": "not built"}), "native-missing"),
        (report(cores={"allowed": 2}), "cores"),
        (report(cores={"quota": 1.5}), "cores"),
        (
            report(environment={"CUDA_LAUNCH_BLOCKING": "1", "TRTLLM_PP_REQ_SEND_ASYNC": "1"}),
            "launch-blocking",
        ),
        (report(environment={"TLLM_DISABLE_MPI": "1"}), "mpi-disabled"),
        (report(environment={"MPIR_CVAR_ASYNC_PROGRESS": "1"}), "async-progress"),
    ],
)
def test_each_finding(facts, finding):
    """It is made, and has all that it needs; the worst come first."""
    found = written(facts)
    assert finding in [one["id"] for one in found]
    severities = [SEVERITIES.index(one["severity"]) for one in found]
    assert severities == sorted(severities)
    for one in found:
        assert list(one) == ["id", "severity", "means", "do"]
        assert all(one.values())
        assert not re.search(r"[{}]|None", one["means"] + one["do"])


def test_every_kind_of_finding_is_made_by_some_report():
    """None is only in the document; those of several ranks together have a test of their own."""
    (made,) = [mark for mark in test_each_finding.pytestmark if mark.name == "parametrize"]
    assert {finding for _, finding in made.args[1]} == {kind.id for kind in KINDS} - {"some-unpatched"}
    assert len({kind.id for kind in KINDS}) == len(KINDS)


def test_the_document_has_every_finding_as_the_doctor_says_it():
    """The table is the kinds' own: a new one is pasted from here."""
    missing = [row for row in rows(KINDS).splitlines() if row not in DOCUMENT.splitlines()]
    assert missing == [], "docs/doctor.md is to have these rows, and no others"
    documented = set(re.findall(r"^\|[^|]*\| `([\w-]+)`, ", DOCUMENT.split("## Environments")[1], re.MULTILINE))
    assert documented == {kind.id for kind in KINDS}


@pytest.mark.parametrize(
    ("upstream", "severity", "do"),
    [
        ({}, "warning", "set TRTLLM_PP_PROGRESS=1"),
        ({"patched": True}, "info", "nothing more: the relay is patched"),
        ({"action": "stand down"}, "info", "nothing of ours"),
    ],
)
@pytest.mark.parametrize("transport", [over("pml ucx", "tcp", "self"), over("pml ucx", "cma", "self")])
def test_what_to_do_about_the_transport_is_what_would_help(transport, upstream, severity, do):
    """Nobody is told to turn on what is on already, or what would stand down."""
    (found,) = (one for one in written(report(transport, tensorrt_llm=upstream)) if one["id"] == "transport-parks")
    assert found["severity"] == severity
    assert found["do"].startswith(do)


@pytest.mark.parametrize(
    ("facts", "finding"),
    [
        (report(environment={"FI_PROVIDER": "^tcp"}), "provider-other"),
        (report(over("netmod ofi", provider="verbs;ofi_rxm"), environment={"FI_PROVIDER": "verbs"}), "provider-other"),
        (report(over("pml cm"), environment={"FI_PROVIDER": "efa"}), "provider-other"),
        (report(environment={"OMPI_MCA_orte_default_hostfile": "/f"}, mpi={"version": "4.1.6"}), "old-settings"),
        (report(environment={"OMPI_MCA_orte_default_hostfile": "/f"}, mpi={"vendor": "MPICH"}), "old-settings"),
        (report(surroundings={"single_copy": None}), "cma-denied"),
        (report(surroundings={"memlock_bytes": 8 << 20}), "memlock"),
        (report(surroundings={"shm_bytes": None}), "small-shm"),
        (report(cores={"allowed": 8, "later": 8}), "mask-cleared"),
        (report(cores={"quota": 8, "ranks": 2}), "cores"),
        (report(over("pml ucx", "cma", "tcp", found_without_tls=["cma", "tcp", "rc_mlx5"])), "tcp-forced"),
    ],
)
def test_a_finding_is_not_made_where_it_is_not_true(facts, finding):
    """Control: what is close to it."""
    assert finding not in [one["id"] for one in written(facts)]


FINE = over("pml ucx", "posix", "self")


@pytest.mark.parametrize("case", [63, 64, 73, 74, 75, 78])
@pytest.mark.parametrize("otherwise", ["fine", "cured"])
def test_case_63_64_73_74_75_78_nothing_is_fine_or_cured(case, otherwise):
    """A worker may not start, or not as the child that was looked at; where MPI has not started nothing is known."""
    changes = {
        63: {"launcher": RANK | {"problem": "mismatch"}},
        64: {"launcher": RANK | {"problem": "tasks"}},
        73: {
            "mpi": {"state": "failed", "error": "no-pmi", "thread_level": None},
            "environment": {"PMIX_MCA_psec": "munge"},
        },
        74: {"surroundings": {"lost_paths": {"OPAL_PREFIX": "/nonexistent"}}},
        75: {"surroundings": {"memlock_bytes": 64 << 10}},
        78: {"mpi": {"state": "off", "error": "not started", "thread_level": None}},
    }[case]
    transport = FINE if otherwise == "fine" else over("pml ucx", "tcp", "self")
    sound = report(transport, tensorrt_llm={"patched": True})
    assert verdict(sound, findings(sound))[0] == otherwise
    facts = report(transport, tensorrt_llm={"patched": True}, **changes)
    assert verdict(facts, findings(facts))[0] == "unknown"


@pytest.mark.parametrize("case", [88, 93, 95])
def test_case_88_93_95_nothing_is_fine_there_either(case):
    """MPI says itself why it does not start, or its launcher cannot be reached."""
    changes = {
        88: {"mpi": {"lines": {"cray-gtl": "GTL library is not linked"}}},
        93: {"mpi": {"lines": {"slurm-pmi": "not built with SLURM's PMI support"}}},
        95: {"surroundings": {"pmix_folder_missing": "/var/spool/pmix"}},
    }[case]
    facts = report(FINE, tensorrt_llm={"patched": True}, **changes)
    assert verdict(facts, findings(facts))[0] == "unknown"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("ucx-endpoint", "[h:1:0] ucp_ep.c:1 UCX  ERROR failed to create UCP endpoint: Destination is unreachable"),
        ("ucx-endpoint", "select.c:630 UCX ERROR no active messages transport to <no debug data>: endpoint timeout"),
        ("ucp-worker", "[TensorRT-LLM][ERROR] Failed to create UCP worker"),
        ("ucx-not-thread-safe", "pml_ucx.c:325 UCP worker does not support MPI_THREAD_MULTIPLE. PML UCX could not be"),
        ("ucx-not-available", "UCX  WARN  network device 'mlx5_0:1' is not available, please use: 'eth0'(tcp)"),
        ("ucx-not-available", "UCX  WARN  transport 'posix' is not available, please use one or more of: cma, tcp"),
        ("ucx-not-available", "UCX  WARN  network devices 'a','b' are not available, please use one or more of: 'c'"),
        ("cray-gtl", "MPIDI_CRAY_init: GPU_SUPPORT_ENABLED is requested, but GTL library is not linked"),
        ("slurm-pmi", "but OMPI was not built with SLURM's PMI support and therefore cannot"),
    ],
)
def test_case_75_88_90_93_what_libraries_say_is_known(name, line):
    """As they print it, one of them each."""
    assert [known for known, pattern in MESSAGES.items() if pattern.search(line)] == [name]


def test_case_63_the_launchers_word_is_compared_with_the_library(monkeypatch):
    """As the doctor has it: of a job that it is in, and of the mpirun that a user would type."""
    open_mpi = Library("Open MPI", "5.0.11", "Open MPI v5.0.11", "/lib/libmpi.so.40")
    hydra = {"PMI_RANK": "0", "PMI_SIZE": "2", "HYDI_CONTROL_FD": "7"}
    monkeypatch.setattr(_launcher, "find_launcher", lambda environ: ("/usr/bin/mpirun", "HYDRA build details:"))
    assert look_at_launcher(hydra, open_mpi)["problem"] == "mismatch"
    assert look_at_launcher({}, open_mpi)["problem"] == "other"
    assert look_at_launcher({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, open_mpi)["problem"] == "tasks"
    assert look_at_launcher({"PMI_RANK": "0", "PMI_SIZE": "1"}, open_mpi)["problem"] == "alone"
    monkeypatch.setattr(_launcher, "find_launcher", lambda environ: ("/usr/bin/mpirun", "mpirun (Open MPI) 5.0.11"))
    assert look_at_launcher({}, open_mpi)["problem"] is None
    assert look_at_launcher({}, None)["problem"] is None


def test_a_healthy_host_has_no_warning():
    """Control: what is right is not found fault with."""
    facts = report(over("pml ucx", "posix", "self"), tensorrt_llm={"patched": True})
    assert ids(facts) == []


# The parts


@pytest.mark.parametrize(
    ("release", "held"),
    [("3.1.5", True), ("3.1.6", True), ("4.0.3", True), ("4.1.2", True), ("4.1.3", False), ("4.2.0.dev0", False)],
)
def test_mpi4py_holds_the_gil_up_to_4_1_2(release, held):
    """mpi4py/mpi4py#789 came after that release."""
    assert holds_gil(release) == held


def test_problems_with_settings_are_all_named():
    """A bad switch, a bad value and a name that is no setting; the receive policy's are its own."""
    found = package(
        {
            "TRTLLM_PP_PROGRESS": "yes",
            "TRTLLM_PP_PROGRESS_MODE": "fast",
            "TRTLLM_PP_PROGRESS_MAXPOLLS": "1",
            "TRTLLM_PP_PROGRESS_VLLM_RECEIVE": "jit",
        }
    )
    switch, mode, name = found["problems"]
    assert "TRTLLM_PP_PROGRESS='yes'" in switch
    assert "TRTLLM_PP_PROGRESS_MODE='fast'" in mode
    assert "TRTLLM_PP_PROGRESS_MAXPOLLS is no setting: valid ones are TRTLLM_PP_PROGRESS_MAX_POLLS" in name
    assert (found["switch"], found["settings"]) == (None, None)


def test_variables_that_matter_are_reported_and_secrets_are_not():
    """TensorRT-LLM's launcher passes a key in one of them."""
    found = environment(
        {"PATH": "/bin", "UCX_TLS": "tcp", "TLLM_SPAWN_PROXY_PROCESS_IPC_HMAC_KEY": "s3cret", "TRTLLM_PP_PROGRESS": "1"}
    )
    assert found == {
        "TLLM_SPAWN_PROXY_PROCESS_IPC_HMAC_KEY": "(hidden)",
        "TRTLLM_PP_PROGRESS": "1",
        "UCX_TLS": "tcp",
    }


# The document and the screen

DOCUMENT = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text()


def full(facts):
    """Return the whole report for some facts, as collect() does."""
    word, reason = verdict(facts, findings(facts))
    return {**facts, "verdict": word, "reason": reason, "findings": written(facts)}


@pytest.mark.parametrize(
    "facts",
    [
        report(),
        report(tensorrt_llm={"patched": True}),
        report(
            mpi=dict.fromkeys(report()["mpi"]) | {"state": "absent", "messages": [], "lines": {}}, tensorrt_llm=ABSENT
        ),
        report(over(None), package={"native": False, "native_error": "[not] built", "problems": ["bad [value]"]}),
    ],
)
def test_every_report_can_be_printed_and_written(facts):
    """Whatever is missing; brackets are text. It fits one screen of 120 columns."""
    whole = full(facts)
    assert json.loads(json.dumps(whole)) == whole
    screen = io.StringIO()
    render(whole, Console(file=screen, width=120))
    text = screen.getvalue()
    assert text.startswith(f"{whole['verdict']}: ")
    assert all(finding["id"] in text for finding in whole["findings"])
    assert len(text.splitlines()) <= 45

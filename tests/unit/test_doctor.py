"""The doctor's judgements: pure functions of what was found, so every host's report can be made here."""

import copy
import io
import json
import math
import re
from pathlib import Path

import pytest
from doubles.eras import ERAS, PATCHED, executor_class
from rich.console import Console

from trtllm_pp_progress._compat import recognise
from trtllm_pp_progress.doctor import EXIT_CODES
from trtllm_pp_progress.doctor._child import RANKS
from trtllm_pp_progress.doctor._findings import PUMP_PERIOD as PUMP
from trtllm_pp_progress.doctor._findings import findings, threshold, verdict
from trtllm_pp_progress.doctor._machine import environment, package, quota
from trtllm_pp_progress.doctor._mpi import holds_gil, select
from trtllm_pp_progress.doctor._report import render
from trtllm_pp_progress.doctor._transport import judge
from trtllm_pp_progress.doctor._ucx import parse_config, parse_resources

UCX = {
    "version": "1.20.1",
    "library": "/lib/libucp.so.0",
    "thread_safe": True,
    "tls": "tcp,self",
    "rndv_thresh": "intra:auto,inter:auto",
    "found": ["self", "tcp"],
}
UNPATCHED = {
    "version": "1.3.0rc20",
    "state": "ok",
    "error": None,
    "era": "E2",
    "action": "patch",
    "reason": "sends are parked",
    "patched": False,
    "patches": ["PyExecutor.send_handles"],
}
ABSENT = dict.fromkeys(UNPATCHED) | {"state": "absent"}


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
        },
        "transport": {**judge("pml ucx", [], UCX), "ucx": UCX} if transport is None else transport,
        "cores": {"allowed": 8, "quota": None, "threads": 3},
        "environment": {},
    }
    for section, values in changes.items():
        facts[section] = {**facts[section], **values}
    return facts


def over(layer, *found, **ucx):
    """Return the transport section of a layer with transports."""
    own = {**UCX, "found": list(found), **ucx}
    return {**judge(layer, list(found), own), "ucx": own}


def ids(facts):
    """Return the ids of the findings."""
    return [finding["id"] for finding in findings(facts)]


# The verdict


@pytest.mark.parametrize(
    ("facts", "word", "said"),
    [
        (report(), "affected", "UCX over tcp parks large messages, and the relay of TensorRT-LLM's era E2 is not"),
        (report(tensorrt_llm=ABSENT), "affected", "UCX over tcp parks"),
        (report(tensorrt_llm={"patched": True}), "cured", "UCX over tcp"),
        (report(tensorrt_llm={"patched": True}, mpi={"thread_level": "SERIALIZED"}), "affected", "THREAD_SERIALIZED"),
        (report(tensorrt_llm={"patched": True, "era": "H"}, environment={PUMP: "5"}), "cured", "UCX over tcp"),
        (report(tensorrt_llm={"patched": True, "era": "H"}, environment={PUMP: "-1"}), "affected", f"{PUMP} turns"),
        (report(tensorrt_llm={"patched": True, "era": "E2"}, environment={PUMP: "0"}), "cured", "UCX over tcp"),
        (report(tensorrt_llm={"patched": True}, environment={"TLLM_DISABLE_MPI": "1"}), "unknown", "torch.distributed"),
        (report(tensorrt_llm={"era": "unknown", "action": "stand down", "reason": "odd"}), "unknown", "odd"),
        (report(tensorrt_llm={**ABSENT, "state": "failed", "error": "no libcuda"}), "unknown", "no libcuda"),
        (report(over("pml ucx", "posix", "sysv", "self")), "fine", "UCX over posix"),
        (report(over("pml ucx", "cma", "posix", "self")), "affected", "UCX over cma"),
        (report(over("pml ucx", "rc_mlx5", "posix", "tcp", "self")), "unknown", "rc_mlx5"),
        (report(over("pml ob1", "self", "sm", "tcp")), "affected", "pml ob1 over sm and tcp"),
        (report(over("pml cm")), "unknown", "pml cm"),
        (report(over(None)), "unknown", "unknown"),
        (report(mpi={"state": "timed out", "error": "no answer", "thread_level": None}), "unknown", "no answer"),
        (report(mpi={"state": "absent", "error": "No module", "thread_level": None}), "unknown", "No module"),
    ],
)
def test_the_verdict(facts, word, said):
    """Affected on UCX over TCP, by that name; cured where a worker is patched; unknown where it cannot be told."""
    found, reason = verdict(facts)
    assert found == word
    assert said in reason


@pytest.mark.parametrize("era", ERAS)
def test_the_verdict_on_each_era_as_it_is_recognised(era):
    """Nothing is parked in the oldest ones, and the names are those that recognise() gives."""
    found = recognise(executor_class(era))
    facts = report(tensorrt_llm={"era": found.era, "action": found.action, "reason": found.reason})
    word, reason = verdict(facts)
    assert word == ("affected" if era in PATCHED else "fine")
    assert f"era {era}" in reason


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
        ("netmod ofi", [], None, None, "unknown"),
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
        ("Intel MPI", "Intel(R) MPI Library 2021", "", {}, None),
    ],
)  # fmt: skip
def test_the_layer_is_the_one_in_use(vendor, library, stderr, environ, layer):
    """From what Open MPI says when it selects, and from MPICH's device."""
    assert select(vendor, library, stderr, environ)["layer"] == layer


def test_what_ucx_prints_is_understood():
    """Its configuration, and the resources of a context: each transport once."""
    assert parse_config("UCX_NET_DEVICES=all\nUCX_TLS=tcp,self\nUCX_RNDV_THRESH=intra:auto,inter:8K\n") == {
        "tls": "tcp,self",
        "rndv_thresh": "intra:auto,inter:8K",
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
        (report(mpi={"messages": ["ucp-worker"]}), "ucp-worker"),
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
        (report(tensorrt_llm={"era": "H", "patched": True}, environment={PUMP: "0"}), "pump-off"),
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
    """It is made, is documented, and has all that it needs; the worst come first."""
    found = findings(facts)
    assert finding in [one["id"] for one in found]
    severities = [("error", "warning", "info").index(one["severity"]) for one in found]
    assert severities == sorted(severities)
    for one in found:
        assert list(one) == ["id", "severity", "means", "do"]
        assert all(one.values())
        assert f"`{one['id']}`" in DOCUMENT


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
    (found,) = (one for one in findings(report(transport, tensorrt_llm=upstream)) if one["id"] == "transport-parks")
    assert found["severity"] == severity
    assert found["do"].startswith(do)


def test_a_healthy_host_has_no_warning():
    """Control: what is right is not found fault with."""
    facts = report(over("pml ucx", "posix", "self"), tensorrt_llm={"patched": True})
    assert ids(facts) == ["upstream-patched"]


# The parts


@pytest.mark.parametrize(
    ("release", "held"),
    [("3.1.5", True), ("3.1.6", True), ("4.0.3", True), ("4.1.2", True), ("4.1.3", False), ("4.2.0.dev0", False)],
)
def test_mpi4py_holds_the_gil_up_to_4_1_2(release, held):
    """mpi4py/mpi4py#789 came after that release."""
    assert holds_gil(release) == held


@pytest.mark.parametrize(
    ("name", "dropped"),
    [
        ("OMPI_COMM_WORLD_RANK", True),
        ("OMPI_UNIVERSE_SIZE", True),
        ("OMPI_MCA_ess_base_jobid", True),
        ("PMIX_RANK", True),
        ("PMI_RANK", True),
        ("PMI_FD", True),
        ("PRTE_LAUNCHED", True),
        ("HYDI_CONTROL_FD", True),
        ("MPI_LOCALRANKID", True),
        ("OMPI_MCA_pml", False),
        ("OMPI_ALLOW_RUN_AS_ROOT", False),
        ("UCX_TLS", False),
        ("MPIR_CVAR_CH4_NETMOD", False),
        ("MPI4PY_RC_THREAD_LEVEL", False),
    ],
)
def test_the_child_is_no_rank(name, dropped):
    """What a launcher tells its ranks is kept from it; what configures MPI is not."""
    assert bool(RANKS.match(name)) == dropped


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


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000\n", None), ("150000 100000\n", 1.5), ("", None), ("1 0", None), (None, None)]
)
def test_a_containers_quota(text, cores, tmp_path):
    """In cores; none where there is none."""
    if text is not None:
        (tmp_path / "cpu.max").write_text(text)
    assert quota(tmp_path / "cpu.max") == cores


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

DOCUMENT = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()


def full(facts):
    """Return the whole report for some facts, as collect() does."""
    word, reason = verdict(facts)
    return {**facts, "verdict": word, "reason": reason, "findings": findings(facts)}


@pytest.mark.parametrize(
    "facts",
    [
        report(),
        report(tensorrt_llm={"patched": True}),
        report(mpi=dict.fromkeys(report()["mpi"]) | {"state": "absent", "messages": []}, tensorrt_llm=ABSENT),
        report(over(None), package={"native": False, "native_error": "[not] built", "problems": ["bad [value]"]}),
    ],
)
def test_every_report_can_be_printed_and_written(facts):
    """Whatever is missing; brackets are text. It fits one screen of 120 columns."""
    written = full(facts)
    assert json.loads(json.dumps(written)) == written
    screen = io.StringIO()
    render(written, Console(file=screen, width=120))
    text = screen.getvalue()
    assert text.startswith(f"{written['verdict']}: ")
    assert all(finding["id"] in text for finding in written["findings"])
    assert len(text.splitlines()) <= 45

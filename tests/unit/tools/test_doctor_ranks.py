"""Reports of a job's ranks made into one: who is patched, who is not and why, what differs."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from trtllm_pp_progress.tools.doctor.ranks import differences, together
from trtllm_pp_progress.tools.doctor.screen import render

HOSTS = ["a", "a", "b", "b"]
DOCUMENT = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text()


def report(verdict="cured", reason="it is patched", findings=(), **changes):
    """Return what a rank found, as far as it is looked at here: patched, and nothing else worth knowing."""
    facts = {
        "package": {
            "version": "0.1.0",
            "python": "3.11.7",
            "native": True,
            "switch": True,
            "problems": [],
            "gate": True,
        },
        "tensorrt_llm": {
            "version": "1.3.0",
            "state": "ok",
            "error": None,
            "era": "E2",
            "action": "patch",
            "reason": "sends are parked",
            "patched": True,
        },
        "mpi": {
            "vendor": "Open MPI",
            "version": "5.0.11",
            "libmpi": "/lib/libmpi.so",
            "mpi4py": "4.1.3",
            "thread_level": "MULTIPLE",
            "state": "ok",
        },
        "transport": {
            "layer": "pml ucx",
            "found": ["tcp"],
            "carrier": "UCX over tcp",
            "ucx": None,
            "parks": "yes",
            "measured": None,
            "parks_within_node": "yes",
            "parks_between_nodes": None,
        },
        "cores": {"allowed": 8, "quota": None, "threads": 3},
        "environment": {"TRTLLM_PP_PROGRESS": "1"},
    }
    for section, values in changes.items():
        facts[section] = {**facts[section], **values}
    keys = ("id", "severity", "means", "do")
    found = [dict(zip(keys, finding, strict=True)) for finding in findings]
    return {**facts, "verdict": verdict, "reason": reason, "findings": found}


def unpatched(**changes):
    """Return what an unpatched rank found."""
    changes["tensorrt_llm"] = {"patched": False, **changes.get("tensorrt_llm", {})}
    return report("affected", "it is not patched", **changes)


def screen(whole):
    """Return what is printed, in one line."""
    out = io.StringIO()
    render(whole, Console(file=out, width=120))
    return " ".join(out.getvalue().split())


def test_two_of_four_ranks_unpatched_are_named_with_the_reason():
    """A pod's variables that reached the leader alone (ai-dynamo/dynamo#4609)."""
    lost = unpatched(package={"switch": None}, environment={"TRTLLM_PP_PROGRESS": "not set"})
    whole = together([report(), report(), lost, lost], HOSTS)
    assert whole["verdict"] == "affected"
    assert whole["reason"] == "2 of 4 ranks are patched, not ranks 2/3 on b: TRTLLM_PP_PROGRESS is not set"
    assert whole["findings"][0]["id"] == "some-unpatched"
    assert whole["findings"][0]["severity"] == "error"
    assert f"`{whole['findings'][0]['id']}`" in DOCUMENT
    assert [(rank["rank"], rank["host"]) for rank in whole["ranks"]] == list(enumerate(HOSTS))
    assert whole["ranks"][2]["report"] is lost
    assert whole["reason"] in screen(whole)
    assert json.loads(json.dumps(whole)) == whole


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"package": {"switch": False}}, "TRTLLM_PP_PROGRESS is 0"),
        ({"package": {"problems": ["MAX_POLLS='x' is not valid"]}}, "MAX_POLLS='x' is not valid"),
        ({"package": {"gate": False}}, "the .pth of this package is not active there"),
        ({"tensorrt_llm": {"state": "absent"}}, "TensorRT-LLM is not installed there"),
        ({"tensorrt_llm": {"state": "crashed", "error": "SIGSEGV"}}, "TensorRT-LLM crashed: SIGSEGV"),
        ({"tensorrt_llm": {"action": "stand down", "reason": "unknown shape"}}, "unknown shape"),
        ({}, "sends are parked"),
    ],
)
def test_each_reason_not_to_be_patched_is_told(changes, why):
    """Of the ranks that it is true of."""
    whole = together([report(), unpatched(**changes)], ["a", "b"])
    assert whole["reason"] == f"1 of 2 ranks are patched, not ranks 1 on b: {why}"


@pytest.mark.parametrize("make", [report, unpatched])
def test_where_all_are_alike_it_is_one_of_their_reports(make):
    """With the ranks beside it; none differs, none is named."""
    whole = together([make()] * 4, HOSTS)
    assert {key: whole[key] for key in make()} == make()
    assert whole["differences"] == []
    assert "ranks 0/1 on a; 2/3 on b" in screen(whole)


def test_the_worst_verdict_is_that_of_all():
    """Affected before unknown before cured before fine."""
    found = [report("fine", "f"), report("cured", "c"), report("unknown", "u"), report("affected", "a")]
    for most in range(1, 5):
        whole = together(found[:most], HOSTS[:most])
        assert whole["verdict"] == found[most - 1]["verdict"]
    assert whole["reason"] == "a (ranks 3 on b)"


def test_a_finding_of_some_ranks_is_told_once_with_the_ranks():
    """The worst first; what is found everywhere is as it was."""
    everywhere, somewhere = ("cores", "warning", "few cores", "bind wider"), ("no-gate", "error", "no gate", "install")
    mine = report(findings=[everywhere])
    whole = together([mine, report(findings=[somewhere, everywhere]), mine], ["a", "b", "c"])
    assert [tuple(finding.values()) for finding in whole["findings"]] == [
        ("no-gate", "error", "no gate (ranks 1 on b)", "install"),
        everywhere,
    ]


@pytest.mark.parametrize(
    ("changes", "what", "values"),
    [
        ({"mpi": {"version": "5.0.12"}}, "MPI", ["Open MPI 5.0.11", "Open MPI 5.0.12"]),
        ({"mpi": {"thread_level": None}}, "thread level", ["MULTIPLE", "none"]),
        ({"transport": {"ucx": {"version": "1.20.1"}}}, "UCX", ["none", "1.20.1"]),
        ({"package": {"version": "0.2.0"}}, "package", ["0.1.0", "0.2.0"]),
        ({"package": {"native": False}}, "native driver", ["built", "not built"]),
        ({"cores": {"allowed": 2}}, "cores", ["8", "2"]),
        ({"environment": {"UCX_TLS": "tcp"}}, "UCX_TLS", ["not set", "tcp"]),
        ({"environment": {"TRTLLM_PP_PROGRESS": "0"}}, "TRTLLM_PP_PROGRESS", ["1", "0"]),
    ],
)
def test_what_differs_is_listed_by_value(changes, what, values):
    """MPI, UCX, variables, versions, cores: each with the ranks that have it, and on the screen."""
    reports = [report(), report(), report(**changes), report()]
    (found,) = differences(reports)
    assert found == {
        "what": what,
        "values": [{"value": values[0], "ranks": [0, 1, 3]}, {"value": values[1], "ranks": [2]}],
    }
    text = screen(together(reports, HOSTS))
    assert f"{values[1]} 2 on b" in text
    assert "0/1 on a; 3 on b" in text

"""perf receive-stall, as far as it goes without a GPU: what it holds back, what it judges, what it takes."""

from __future__ import annotations

import pytest

from receive import stall

GOOD = {"seconds": 2.3, "limit_s": 3.0, "unblocked": True, "trouble": "no step began", "active": False, "right": True}


@pytest.mark.parametrize(
    ("environ", "delay"),
    [
        ({}, 3),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, 3),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_BUFFSIZE": "4096"}, 3),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_BUFFSIZE": "16384", "NCCL_PROTO": "Simple"}, 3),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_BUFFSIZE": "8192", "NCCL_PROTO": "Simple"}, 2),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_BUFFSIZE": "1024", "NCCL_PROTO": "Simple"}, 0),
    ],
)
def test_the_delay_is_the_one_that_is_shipped(monkeypatch, environ, delay):
    """As the package finds it in the environment of the run."""
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_BUFFSIZE", "NCCL_PROTO"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert stall.shipped_delay(4, 0) == delay


@pytest.mark.parametrize(
    ("long", "staged", "connections", "words"),
    [
        ([], {}, "default", []),
        ([], {}, "1", []),
        (["gain 1.20, expected 1.97"], {}, "1", ["gain"]),
        ([], {"right": False}, "1", ["not what was sent"]),
        ([], {"active": True}, "default", ["went on"]),
        ([], {"seconds": 9.0}, "default", ["at most 3.0"]),
        ([], {"unblocked": False, "seconds": 30.0, "active": True}, "default", ["at most 3.0"]),
        ([], {"unblocked": False, "seconds": 30.0}, "1", []),  # nothing may get past what one queue is stuck in
    ],
)
def test_what_fails(long, staged, connections, words):
    """A run that was right and in time passes; each thing that was not is named."""
    judged = stall.judge({"long": {"failures": long}, "stall": {**GOOD, **staged}}, connections)
    assert [any(word in line for line in judged.failures) for word in words] == [True] * len(words)
    assert len(judged.failures) == len(words)
    assert stall.judge({"long": {"failures": []}, "stall": None}, connections).code == 0


def test_without_a_gpu_it_says_so(capsys):
    """Exit code 2, before anything is measured."""
    assert stall.main(["--minutes", "0.1"]) == 2
    assert "receive-stall: needs" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--minutes", "0"], ["--pp", "1"], ["--stall-s", "0.1"], ["--load", "other"]])
def test_bad_options_are_refused(words, capsys):
    """With what is valid."""
    with pytest.raises(SystemExit):
        stall.options_from(words)
    assert capsys.readouterr().err

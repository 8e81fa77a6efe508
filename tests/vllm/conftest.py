"""What every test of the receive policy shares: versions in the header, and stock runs that are made once."""

from __future__ import annotations

from importlib.metadata import version
from types import SimpleNamespace

import pytest


def pytest_report_header() -> str:
    return f"vllm {version('vllm')}, torch {version('torch')}"


@pytest.fixture
def seen(monkeypatch):
    """Return what is seen of a worker, which a test changes through `seen.facts`; leave no attachment behind."""
    from test_gates import GOOD

    from trtllm_pp_progress.vllm import shape
    from trtllm_pp_progress.vllm.attachment import attachments

    seen = SimpleNamespace(facts=GOOD)
    monkeypatch.setattr(shape, "observe", lambda worker: seen.facts)
    yield seen
    for attachment in list(attachments):
        attachment.detach()


@pytest.fixture(scope="session")
def stock_run():
    """Return a scenario's outcome under stock vLLM."""
    import vllm.v1.worker.gpu.model_runner  # noqa: F401  imported once here, and so never in a rank
    from pp_world import run

    import trtllm_pp_progress.vllm.attachment  # noqa: F401

    outcomes = {}

    def outcome(scenario):
        if scenario.stock not in outcomes:
            outcomes[scenario.stock] = run(scenario.stock)
        return outcomes[scenario.stock]

    return outcome


@pytest.fixture
def posted(monkeypatch):
    """Return a list of the broadcasts that really went out, and let streams be plain objects."""
    from contextlib import contextmanager

    import torch

    issued = []
    current = []

    @contextmanager
    def use(stream):
        current.append(stream)
        yield
        current.pop()

    def broadcast(tensor, src=None, group=None, async_op=False):
        issued.append(tensor)
        if current:
            current[-1].issued.append(tensor)

    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1] if current else None)
    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    return issued

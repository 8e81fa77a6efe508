"""The policy around a worker: when it starts, what makes it flush, and how it ends."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
from stubs import PPHandler, make_worker
from test_gates import GOOD

from trtllm_pp_progress.vllm import ReceiveRefused, SettingsError, attach, status, uninstall
from trtllm_pp_progress.vllm import _gates as gates
from trtllm_pp_progress.vllm._attach import BOUNDARIES, Attachment, attachments
from trtllm_pp_progress.vllm._settings import load_settings


@pytest.fixture
def seen(monkeypatch):
    """Return what the gates see; a test changes it through `seen.facts`."""
    seen = SimpleNamespace(facts=GOOD)
    monkeypatch.setattr(gates, "observe", lambda worker: seen.facts)
    yield seen
    for attachment in list(attachments):
        attachment.detach()


def steps(handler, count):
    for _ in range(count):
        handler.get_prev_sampled_outputs()
        handler.receive()


def output(tokens):
    return SimpleNamespace(total_num_scheduled_tokens=tokens)


def attached(handler, **arguments):
    calls = []
    worker = make_worker(handler, calls)
    attachment = Attachment(worker, load_settings({}, **{"receive": 3, "timing": "off", **arguments}))
    return worker, attachment, calls


def test_the_policy_is_off_until_warm_up_has_returned(seen, posted):
    """Warm-up's own steps are stock's; from the return on receives are deferred."""
    handler = PPHandler()
    worker, attachment, _ = attached(handler)
    assert "receive" not in vars(handler)
    steps(handler, 2)
    assert len(posted) == 4
    assert worker.compile_or_warm_up_model() == "compile_or_warm_up_model"
    assert attachment.status()["active"]
    steps(handler, 3)
    assert [step for step, number in posted if number == 0] == [1, 2, 3]


def test_a_second_warm_up_sees_stock(seen, posted):
    """Whatever warms up again finds every receive posted and the handler's own methods; then the policy is back."""
    handler, found = PPHandler(), []
    worker = make_worker(handler)
    worker.compile_or_warm_up_model = lambda: found.append(("receive" in vars(handler), len(posted)))
    attachment = Attachment(worker, load_settings({}, receive=3, timing="off"))
    worker.compile_or_warm_up_model()
    steps(handler, 3)
    worker.compile_or_warm_up_model()
    assert found == [(False, 0), (False, 6)]
    assert attachment.status()["active"]


def test_warm_up_that_fails_leaves_stock(seen, posted):
    """No policy starts on a worker whose warm-up raised."""
    handler = PPHandler()
    worker = make_worker(handler)

    def fail():
        raise MemoryError

    worker.compile_or_warm_up_model = fail
    Attachment(worker, load_settings({}, receive=2, timing="off"))
    with pytest.raises(MemoryError):
        worker.compile_or_warm_up_model()
    assert "receive" not in vars(handler)


@pytest.mark.parametrize("name", ["sleep", "wake_up", "synchronize_device", "update_weights", "execute_dummy_batch"])
def test_a_boundary_finds_nothing_held_back(seen, posted, name):
    """Everything saved is posted before the worker's own method runs; a call that is no boundary posts nothing."""
    handler = PPHandler()
    worker, attachment, calls = attached(handler)
    worker.compile_or_warm_up_model()
    steps(handler, 3)
    assert worker.check_health() == "check_health"
    assert len(posted) == 2
    assert getattr(worker, name)() == name
    assert len(posted) == 6
    assert attachment.status()["counters"]["posts_by_reason"][f"flush_{name}"] == 2
    assert calls[-2:] == ["check_health", name]


def test_every_boundary_is_a_method_of_vllms_worker():
    """A name that no installed worker has would be a spelling mistake."""
    from vllm.v1.worker.gpu_worker import Worker

    assert [name for name in BOUNDARIES if not callable(getattr(Worker, name, None))] == []


def test_silence_is_recognised(seen, posted):
    """An empty step with no request alive flushes; an empty step with one alive, or a step with tokens, does not."""
    handler = PPHandler()
    worker, _, _ = attached(handler)
    worker.compile_or_warm_up_model()
    live = worker.model_runner.req_states.req_id_to_index
    steps(handler, 3)
    worker.execute_model(output(0))
    live.clear()
    worker.execute_model(output(5))
    assert len(posted) == 2
    worker.execute_model(output(0))
    assert len(posted) == 6


def test_shutdown_flushes_reports_and_goes_on(seen, posted, caplog):
    """The last line of the log is the statistics, in JSON, and the worker's own shutdown runs."""
    caplog.set_level(logging.INFO, "vllm.trtllm_pp_progress")
    handler = PPHandler()
    worker, _, calls = attached(handler)
    worker.compile_or_warm_up_model()
    steps(handler, 3)
    worker.shutdown()
    assert calls[-1] == "shutdown"
    assert len(posted) == 6
    said = json.loads(caplog.messages[-1].partition("at shutdown: ")[2])
    assert said["counters"]["posts"] == 3
    assert said["rank"] == 0


def test_shutdown_goes_on_where_a_peer_is_gone(seen, posted, caplog, monkeypatch):
    """A communicator that raises keeps no worker from going; what was left is said."""
    import torch

    handler = PPHandler()
    worker, _, calls = attached(handler)
    worker.compile_or_warm_up_model()
    steps(handler, 3)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: 1 / 0)
    worker.shutdown()
    assert calls[-1] == "shutdown"
    assert "left unposted" in caplog.text


def test_the_last_rank_is_only_timed(seen, posted):
    """No receive there to defer: its role is the source's."""
    handler = PPHandler()
    handler.is_last_rank = True
    seen.facts = replace(GOOD, rank=3)
    worker, attachment, _ = attached(handler, receive="rank-aware")
    worker.compile_or_warm_up_model()
    assert attachment.status()["role"] == "source"
    assert "receive" not in vars(handler)
    assert handler.broadcast() == "sent"
    assert attachment.status()["counters"]["broadcasts"] == 1


def test_detaching_restores_worker_and_handler(seen, posted):
    """Afterwards both have the attributes they had, by identity."""
    handler = PPHandler()
    worker = make_worker(handler)
    before = dict(vars(worker))
    attachment = Attachment(worker, load_settings({}, receive=2, timing="off"))
    worker.compile_or_warm_up_model()
    attachment.detach()
    assert vars(worker) == before
    assert "receive" not in vars(handler)


@pytest.mark.parametrize(("receive", "delay"), [(1, 1), (3, 3), ("rank-aware", 2)])
def test_the_delay_of_a_rank(seen, receive, delay):
    """A number holds for every rank; rank-aware is this rank's own."""
    seen.facts = replace(GOOD, rank=1)
    _, attachment, _ = attached(PPHandler(), receive=receive)
    assert attachment.status()["delay"] == delay


@pytest.mark.parametrize("facts", [GOOD, replace(GOOD, platform="cpu"), replace(GOOD, rank=3)])
def test_a_delay_of_pp_size_is_an_error_on_every_rank_and_platform(seen, facts):
    """The operator's mistake is said first, at start, wherever it is seen."""
    seen.facts = facts
    with pytest.raises(SettingsError, match="pp_size=4"):
        attach(make_worker(PPHandler()), receive=4)


def test_without_a_pipeline_any_delay_is_moot(seen):
    """One stage has no receive: refused for that, not for the delay."""
    seen.facts = replace(GOOD, pp_size=1)
    with pytest.raises(ReceiveRefused, match="size is 1"):
        attach(make_worker(PPHandler()), receive=4)


def test_a_refused_worker_is_untouched(seen):
    """A gate that says no has changed nothing."""
    seen.facts = replace(GOOD, async_scheduling=False)
    handler = PPHandler()
    worker = make_worker(handler)
    before, mine = dict(vars(worker)), dict(vars(handler))
    with pytest.raises(ReceiveRefused, match="async scheduling"):
        attach(worker, receive=2)
    assert vars(worker) == before
    assert vars(handler) == mine


def test_a_worker_takes_one_policy(seen, posted):
    """A second one would defer what the first has deferred; it is refused and the first goes on."""
    handler = PPHandler()
    worker, attachment, _ = attached(handler)
    with pytest.raises(ReceiveRefused, match="already"):
        attach(worker, receive=2)
    worker.compile_or_warm_up_model()
    assert attachment.status()["active"]
    assert [found["delay"] for found in status()["workers"]] == [3]
    uninstall()
    assert "receive" not in vars(handler)
    assert status()["workers"] == []


def test_a_worker_of_no_known_shape_is_refused(monkeypatch):
    """What cannot even be looked at is left alone, and the error says what was missing."""
    with pytest.raises(ReceiveRefused, match=r"not known.*vllm_config"):
        attach(SimpleNamespace(), receive=2)


def test_status_is_plain_values(seen, posted):
    """It can be written as JSON as it is."""
    worker, attachment, _ = attached(PPHandler())
    worker.compile_or_warm_up_model()
    assert json.loads(json.dumps(attachment.status()))["settings"] == {
        "receive": 3, "placement": "post-model", "timing": "off", "stall_warning_s": 8.0,
    }  # fmt: skip
    assert json.dumps(status())

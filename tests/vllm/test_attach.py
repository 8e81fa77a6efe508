"""The policy around a worker: when it starts, what makes it flush, and how it ends."""

from __future__ import annotations

import ast
import inspect
import json
import logging
import textwrap
from dataclasses import replace
from types import SimpleNamespace

import pytest
from stubs import PPHandler, make_worker
from test_gates import GOOD

from trtllm_pp_progress.vllm import IncompatibleError, SettingsError, attach, status, uninstall
from trtllm_pp_progress.vllm.attachment import Attachment, boundaries
from trtllm_pp_progress.vllm.settings import load_settings


def steps(handler, count):
    for _ in range(count):
        handler.get_prev_sampled_outputs()
        handler.receive()


def output(tokens, finished=()):
    return SimpleNamespace(total_num_scheduled_tokens=tokens, finished_req_ids=set(finished))


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


@pytest.mark.parametrize(
    "name", ["sleep", "wake_up", "synchronize_device", "update_weights", "execute_dummy_batch", "check_health"]
)
def test_a_boundary_finds_nothing_held_back(seen, posted, name):
    """Everything saved is posted before the worker's own method runs; a call that is no boundary posts nothing."""
    handler = PPHandler()
    worker, attachment, calls = attached(handler)
    worker.compile_or_warm_up_model()
    steps(handler, 3)
    assert worker.take_draft_token_ids() == "take_draft_token_ids"
    assert len(posted) == 2
    assert getattr(worker, name)() == name
    assert len(posted) == 6
    assert attachment.status()["counters"]["posts_by_reason"][f"flush_{name}"] == 2
    assert calls[-2:] == ["take_draft_token_ids", name]


KNOWN_BOUNDARIES = {
    "sleep", "wake_up", "discard", "checkpoint_prepare", "checkpoint_restore", "synchronize_device", "reload_weights",
    "reset_weights", "start_weight_update", "start_draft_weight_update", "update_weights", "execute_dummy_batch",
    "elastic_ep_execute", "handle_ft_command", "add_lora", "profile", "save_sharded_state", "check_health",
}  # fmt: skip


def test_every_method_of_vllms_worker_is_a_boundary_but_those_of_a_step():
    """What its own step calls of itself must be none, or each step would flush; what a step is not must be one."""
    from vllm.v1.worker.gpu_worker import Worker

    worker = object.__new__(Worker)
    found = set(boundaries(worker))
    assert KNOWN_BOUNDARIES - {name for name in KNOWN_BOUNDARIES if not hasattr(Worker, name)} <= found
    called = set()
    for step in (Worker.execute_model, Worker.sample_tokens):
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(step))))
        called |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and on_self(node)}
    assert called & found == set()
    assert "annotate_profile" in called  # the check looks at what it should


def on_self(node):
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def test_case_70_a_method_that_an_extension_brings_is_a_boundary(seen, posted):
    """An update under its own name, from a class that vLLM mixes into the worker's, finds all posted."""
    handler = PPHandler()
    worker = make_worker(handler)

    class Extended:
        rank = property(lambda self: 1 / 0)  # not even looked at

        def update_by_our_own_name(self):
            return len(posted)

        def _private(self):
            return len(posted)

    extended = Extended()
    vars(extended).update(vars(worker))
    Attachment(extended, load_settings({}, receive=3, timing="off"))
    extended.compile_or_warm_up_model()
    steps(handler, 3)
    assert extended._private() == 2
    assert extended.update_by_our_own_name() == 6


def test_silence_is_recognised(seen, posted):
    """An empty step with no request alive flushes; an empty step with one alive, or a step with tokens, does not.

    An empty step that says who has finished flushes whoever is alive: a session that waits for its next input may be
    all that is left, and nothing follows.
    """
    handler = PPHandler()
    worker, _, _ = attached(handler)
    worker.compile_or_warm_up_model()
    live = worker.model_runner.req_states.req_id_to_index
    steps(handler, 3)
    worker.execute_model(output(0))
    live.clear()
    worker.execute_model(output(5))
    assert len(posted) == 2
    worker.execute_model(output(5, {"gone"}))
    assert len(posted) == 2
    worker.execute_model(output(0))
    assert len(posted) == 6
    live["session"] = 0
    steps(handler, 2)
    posted.clear()
    worker.execute_model(output(0))
    assert posted == []
    worker.execute_model(output(0, {"gone"}))
    assert len(posted) == 4


def test_an_empty_step_posts_what_is_due(seen, posted):
    """Amid live requests it lets nothing else go."""
    handler = PPHandler()
    worker, attachment, _ = attached(handler, receive=2)
    worker.compile_or_warm_up_model()
    steps(handler, 3)
    handler.get_prev_sampled_outputs()
    worker.execute_model(output(0))
    assert attachment.status()["counters"]["posts_by_reason"] == {"empty": 1, "prime": 1}
    assert attachment.status()["held"] == 1


def test_a_step_that_waits_for_a_result_leaves_no_more_held_than_is_taken(seen, posted):
    """With structured output the engine waits in the middle of a step for an older result, and so maybe for us."""
    seen.facts = replace(GOOD, pp_size=8, rank=0, per_step=3)
    handler = PPHandler(depth=8)
    worker, attachment, _ = attached(handler, receive="rank-aware")
    worker.compile_or_warm_up_model()
    steps(handler, 7)
    assert (attachment.status()["delay"], attachment.status()["held"]) == (7, 6)
    worker.execute_model(output(5))
    assert attachment.status()["held"] == 6
    waiting = output(5)
    waiting.pending_structured_output_tokens = True
    worker.execute_model(waiting)
    assert attachment.status()["held"] == 2
    assert attachment.status()["counters"]["posts_by_reason"]["flush_deferred"] == 4


@pytest.mark.parametrize(
    ("environ", "facts", "delays"),
    [
        ({}, {"per_step": 2}, [3, 3, 3]),
        ({}, {"per_step": 3}, [3, 2, 2]),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"per_step": 3}, [2, 2, 2]),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"per_step": 2, "message_bytes": 70_000}, [1, 1, 1]),
        ({"GPU_MAX_HW_QUEUES": "1"}, {"per_step": 3, "platform": "rocm"}, [2, 2, 2]),
    ],
)
def test_a_delay_is_no_longer_than_the_transport_allows(seen, monkeypatch, caplog, environ, facts, delays):
    """Said once on a rank that is cut short, and in its status; the same delay was asked for on each."""
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "GPU_MAX_HW_QUEUES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    for rank, delay in enumerate(delays):
        seen.facts = replace(GOOD, rank=rank, **facts)
        caplog.clear()
        _, attachment, _ = attached(PPHandler(), receive=3)
        assert attachment.status()["delay"] == delay
        assert ("not 3" in caplog.text) == (delay < 3)
        assert attachment.status()["transport"]["ahead"] > 0


def test_a_worker_is_refused_where_nothing_may_be_held_back(seen, monkeypatch):
    """On every rank, the last one included, with the variable, the size and what is taken."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for rank in range(4):
        seen.facts = replace(GOOD, rank=rank, per_step=3, message_bytes=70_000)
        with pytest.raises(IncompatibleError, match=r"CUDA_DEVICE_MAX_CONNECTIONS=1.*2 broadcasts.*70000 bytes.*3"):
            attach(make_worker(PPHandler()), receive="rank-aware")


class TestWatching:
    """What is told of a rank that stands still, with the policy and without."""

    @pytest.fixture
    def stuck(self, seen, posted, monkeypatch):
        """Return an attached worker whose streams say what a test wants."""
        import torch

        monkeypatch.setattr(torch.cuda, "Stream", lambda device=None, priority=0: type(handler.main_stream)())
        handler = PPHandler()
        handler.main_stream.query = lambda: not handler.busy
        handler.broadcast_stream.query = lambda: not handler.busy
        handler.busy, handler.now = False, 0.0

        def make(**arguments):
            worker, attachment, _ = attached(handler, **arguments)
            worker.compile_or_warm_up_model()
            attachment._watch.stop()  # the test looks itself
            attachment._watch._clock = lambda: handler.now
            return handler, attachment

        return make

    def test_silence_is_let_go_of_and_the_policy_goes_on(self, stuck, posted, caplog):
        """Held back with nothing to do and no step: posted at the next look, without a word."""
        handler, attachment = stuck()
        steps(handler, 3)
        attachment._watch.look()
        assert len(posted) == 2
        attachment._watch.look()
        assert len(posted) == 6
        assert attachment.status()["active"]
        assert attachment.status()["counters"]["posts_by_reason"] == {"flush_quiet": 2, "prime": 1}
        assert caplog.messages == []

    def test_a_stall_is_unblocked_told_once_and_ends_the_policy(self, stuck, posted, caplog):
        """Within its time, whatever the streams are stuck in."""
        handler, attachment = stuck()
        steps(handler, 3)
        handler.busy = True
        attachment._watch.look()
        for handler.now in (7.9, 8.0, 9.0, 10.0):
            attachment._watch.look()
            assert len(posted) == (2 if handler.now < 8 else 6)
        (message,) = caplog.messages
        assert "2 are posted now, and none is held back from now on" in message
        assert "own model work has not ended" in message
        found = attachment.status()
        assert (found["active"], found["held"], found["stalls"]) == (False, 0, 1)
        assert "no step began" in found["trouble"]

    def test_watching_alone_defers_nothing(self, stuck, posted, caplog):
        """No method of the handler is touched; who is waited for is told, and metrics have it."""
        handler, attachment = stuck(receive="watch")
        assert "receive" not in vars(handler)
        steps(handler, 3)
        assert len(posted) == 6
        handler.busy = True
        attachment._watch.look()
        handler.now = 9.0
        attachment._watch.look()
        (message,) = caplog.messages
        assert "pipeline rank 0 of 4" in message
        assert "waits for rank 3 to send it" in message
        found = attachment.status()
        assert (found["role"], found["active"], found["delay"], found["stalls"]) == ("receiver", False, None, 1)
        assert found["stalled_s"] == 9.0

    def test_watching_takes_what_deferring_does_not(self, seen):
        """Any handler with a broadcast stream, whatever its shape, runner or backend; not one without."""
        seen.facts = replace(GOOD, runner="x", handler="y", backend="gloo", unknown_shape="z", defers_itself=True)
        attach(make_worker(PPHandler()), receive="watch")
        with pytest.raises(IncompatibleError):
            attach(make_worker(PPHandler()), receive="on")
        bare = PPHandler()
        del bare.broadcast_stream
        with pytest.raises(IncompatibleError, match="has no broadcast_stream"):
            attach(make_worker(bare), receive="watch")
        seen.facts = replace(GOOD, pp_size=1)
        with pytest.raises(IncompatibleError, match="size is 1"):
            attach(make_worker(PPHandler()), receive="watch")


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
    with pytest.raises(IncompatibleError, match="size is 1"):
        attach(make_worker(PPHandler()), receive=4)


def test_a_refused_worker_is_untouched(seen):
    """A gate that says no has changed nothing."""
    seen.facts = replace(GOOD, defers_itself=True)
    handler = PPHandler()
    worker = make_worker(handler)
    before, mine = dict(vars(worker)), dict(vars(handler))
    with pytest.raises(IncompatibleError, match="defers receives itself"):
        attach(worker, receive=2)
    assert vars(worker) == before
    assert vars(handler) == mine


def test_a_worker_takes_one_policy(seen, posted):
    """A second one would defer what the first has deferred; it is refused and the first goes on."""
    handler = PPHandler()
    worker, attachment, _ = attached(handler)
    with pytest.raises(IncompatibleError, match="already"):
        attach(worker, receive=2)
    worker.compile_or_warm_up_model()
    assert attachment.status()["active"]
    assert [found["delay"] for found in status()["workers"]] == [3]
    uninstall()
    assert "receive" not in vars(handler)
    assert status()["workers"] == []


def test_a_worker_of_no_known_shape_is_refused(monkeypatch):
    """What cannot even be looked at is left alone, and the error says what was missing."""
    with pytest.raises(IncompatibleError, match=r"not known.*vllm_config"):
        attach(SimpleNamespace(), receive=2)


def test_status_is_plain_values(seen, posted):
    """It can be written as JSON as it is."""
    worker, attachment, _ = attached(PPHandler())
    worker.compile_or_warm_up_model()
    assert json.loads(json.dumps(attachment.status()))["settings"] == {
        "receive": 3, "timing": "off", "stall_warning_s": 8.0,
    }  # fmt: skip
    assert json.dumps(status())

"""The adapter around a handler: what it keeps back, what it lets pass, and when it stands down."""

from __future__ import annotations

import threading
from collections import namedtuple

import pytest
import torch
from stubs import Event, PendingRecv, PPHandler, Stream

from trtllm_pp_progress.vllm._adapter import Receiver, Source
from trtllm_pp_progress.vllm._record import Recorder
from trtllm_pp_progress.vllm._stats import StreamTimer


def started(handler, delay=3, placement="post-model", **more):
    receiver = Receiver(handler, delay, placement, **more)
    receiver.activate()
    return receiver


def steps(handler, count, needed=True):
    for _ in range(count):
        handler.get_prev_sampled_outputs()
        handler.receive(needed)


@pytest.mark.parametrize("broadcasts", [1, 2, 3])
def test_a_step_moves_as_one_unit_and_its_event_covers_it(posted, broadcasts):
    """All broadcasts of a step, packed or not, go out together and in order, and the slot's event is behind them."""
    handler = PPHandler(broadcasts=broadcasts)
    started(handler)
    steps(handler, 5)
    assert posted == [(step, number) for step in (1, 2) for number in range(broadcasts)]
    assert handler.queue[0].event.covers == posted
    assert handler.broadcast_stream.waited[-1] is handler.main_stream


def test_nothing_is_shadowed_before_activation_and_after_deactivation(posted):
    """Off means off: the handler's own methods, found on its class, and every receive posted."""
    handler = PPHandler()
    before = dict(vars(handler))
    receiver = Receiver(handler, 3, "post-model")
    assert vars(handler) == before
    receiver.activate()
    steps(handler, 3)
    receiver.deactivate("test")
    assert "receive" not in vars(handler)
    assert "get_prev_sampled_outputs" not in vars(handler)
    assert [step for step, number in posted if number == 0] == [1, 2, 3]
    steps(handler, 1)
    assert posted[-1] == (4, 1)


def test_activation_and_deactivation_can_be_repeated(posted):
    """A second call changes nothing, a new activation starts afresh and goes on counting."""
    handler = PPHandler()
    receiver = started(handler)
    receiver.activate()
    steps(handler, 2)
    receiver.deactivate("test")
    receiver.deactivate("test")
    receiver.activate()
    steps(handler, 4)
    receiver.deactivate("test")
    assert [step for step, number in posted if number == 0] == [1, 2, 3, 4, 5, 6]
    assert receiver.counters()["posts_by_reason"] == {"flush_test": 4, "prime": 2}


def test_a_shadow_over_ours_stays_and_leads_through(posted):
    """Somebody else's wrapper is not torn out; under it ours lets everything pass while the policy is off."""
    handler = PPHandler()
    receiver = started(handler)
    ours = handler.receive
    handler.receive = theirs = lambda *args: ours(*args)
    receiver.deactivate("test")
    assert handler.receive is theirs
    steps(handler, 2)
    assert posted[-1] == (2, 1)
    receiver.activate()
    assert handler.receive is theirs
    steps(handler, 3)
    assert posted[-1] == (3, 1)  # once deferred, not twice


def test_broadcasts_of_others_pass_while_recording(posted):
    """Other groups and threads are not held back, and torch has its own function again afterwards, also on error."""
    stock = torch.distributed.broadcast
    group = object()

    def record():
        with Recorder(group) as calls:
            torch.distributed.broadcast("mine", src=0, group=group)
            torch.distributed.broadcast("by position", 0, group)
            torch.distributed.broadcast("another group's", src=0, group=object())
            torch.distributed.broadcast("the default group's", src=0)
            thread = threading.Thread(target=torch.distributed.broadcast, args=("a thread's", 0, group))
            thread.start()
            thread.join(10)
            assert [args[0] for _, args, _ in calls] == ["mine", "by position"]
            raise KeyError

    with pytest.raises(KeyError):
        record()
    assert torch.distributed.broadcast is stock
    assert posted == ["another group's", "the default group's", "a thread's"]


def test_two_recorders_do_not_put_back_each_others_function(posted):
    """A second thread's recorder waits its turn, so that torch is as before whoever ends last."""
    stock, group = torch.distributed.broadcast, object()
    entered, others = threading.Event(), []

    def other():
        entered.set()
        with Recorder(group) as calls:
            torch.distributed.broadcast("other", src=0, group=group)
        others.extend(calls)

    with Recorder(group) as calls:
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(10)
        torch.distributed.broadcast("mine", src=0, group=group)
    thread.join(10)
    assert (len(calls), len(others)) == (1, 1)
    assert torch.distributed.broadcast is stock


def test_an_error_in_the_handler_leaves_the_policy_as_it_was(posted):
    """What the handler raises comes through, and the next step goes on in order."""
    handler = PPHandler()
    receiver = started(handler)
    steps(handler, 2)
    with pytest.raises(TypeError):
        handler.receive(needed=True, unknown=1)
    steps(handler, 1)
    receiver.flush("test")
    assert [step for step, number in posted if number == 0] == [1, 2, 3]


@pytest.mark.parametrize("broadcasts", [0, 4])
def test_a_number_of_broadcasts_that_is_not_known_stands_the_policy_down(posted, broadcasts, caplog):
    """At the first receive, with nothing saved yet: everything goes out, in order, and the handler is stock again."""
    handler = PPHandler(broadcasts=broadcasts)
    receiver = started(handler)
    steps(handler, 2)
    assert posted == [(step, number) for step in (1, 2) for number in range(broadcasts)]
    assert f"issued {broadcasts} broadcasts" in receiver.trouble
    assert "posted as vLLM does" in caplog.text
    assert "receive" not in vars(handler)
    receiver.activate()
    assert not receiver.active


def test_a_slot_whose_event_cannot_be_replaced_stands_the_policy_down(posted, monkeypatch):
    """The main stream then waits for the broadcast itself: the event of step T covers nothing."""
    frozen = namedtuple("PendingRecv", "event tokens")
    handler = PPHandler()
    receiver = started(handler)
    monkeypatch.setitem(PPHandler.receive.__globals__, "PendingRecv", frozen)
    steps(handler, 1)
    assert posted == [(1, 0), (1, 1)]
    assert handler.main_stream.waited == [handler.broadcast_stream]
    assert receiver.trouble


def test_whoever_uses_the_event_of_a_saved_receive_gets_it_posted(posted):
    """A consumer that the policy does not know reads no unfilled buffer, and nothing overtakes what is older."""
    handler = PPHandler()
    receiver = started(handler)
    steps(handler, 4)
    assert handler.queue[-1].event.covers == [(step, number) for step in (1, 2, 3, 4) for number in (0, 1)]
    assert receiver.counters()["posts_by_reason"]["flush_touched"] == 3


def test_an_event_that_never_came_is_an_error_not_a_read(posted, monkeypatch):
    """Where posting failed, using the event raises: better no token than a wrong one."""
    handler = PPHandler()
    started(handler)
    steps(handler, 2)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: 1 / 0)
    event = handler.queue[-1].event
    with pytest.raises(ZeroDivisionError):
        event.query()
    with pytest.raises(RuntimeError, match="could not be posted"):
        event.query()


def test_the_wait_for_a_late_result_is_timed(posted, monkeypatch):
    """Only where the event has not passed at consumption, and not where every row was freed and nothing waits."""
    handler = PPHandler(depth=2)
    receiver = started(handler, delay=1, timer=StreamTimer(lambda: Event([])))
    steps(handler, 4)
    assert receiver.counters()["unready_at_consume"] == 0
    monkeypatch.setattr(Event, "query", lambda self: False)
    steps(handler, 3)
    stock = PPHandler.get_prev_sampled_outputs
    receiver.deactivate("test")
    monkeypatch.setattr(PPHandler, "get_prev_sampled_outputs", lambda self: stock(self) and None)
    receiver.activate()
    steps(handler, 4)
    counters = receiver.counters()
    assert counters["unready_at_consume"] == 5
    monkeypatch.setattr(Event, "query", lambda self: True)
    assert receiver.counters()["waited"]["count"] == 3


def test_a_step_without_need_is_counted_and_leaves_a_hole(posted):
    """A batch of which nobody needs the result queues nothing."""
    handler = PPHandler()
    receiver = started(handler)
    steps(handler, 3, needed=False)
    assert receiver.counters()["skipped"] == 3
    assert posted == []


def test_the_source_posts_as_ever(posted):
    """The last rank holds nothing back; its broadcasts are counted and timed until it is shut off."""
    handler = PPHandler()
    handler.queue.clear()
    source = Source(handler, StreamTimer(lambda: Event([])))
    source.activate()
    assert handler.broadcast("tokens") == "sent"
    assert handler.broadcast_drafts("tokens") == "drafts sent"
    handler.sampled_tokens_broadcast = False
    assert handler.broadcast("tokens") == "sent"
    assert source.flush("idle") == 0
    counters = source.counters()
    assert (counters["broadcasts"], counters["draft_broadcasts"], counters["residency"]["count"]) == (1, 1, 2)
    source.deactivate("test")
    assert "broadcast" not in vars(handler)


def test_a_handler_of_this_shape_is_what_the_stub_says():
    """The stub is a stand-in for streams and slots alone: what it does to a queue is what vLLM's handler does."""
    handler = PPHandler(depth=2)
    assert isinstance(handler.main_stream, Stream)
    assert handler.get_prev_sampled_outputs() is None
    handler.queue[-1] = PendingRecv(Event([]), 7)
    assert handler.get_prev_sampled_outputs() is None
    assert handler.get_prev_sampled_outputs() == {"tokens": 7}

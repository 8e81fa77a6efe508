"""The adapter around a handler: what it keeps back, what it lets pass, and when it stands down."""

from __future__ import annotations

import threading
from collections import namedtuple

import pytest
import torch
from stubs import Event, PendingRecv, PPHandler, Stream

from trtllm_pp_progress.vllm.receiver import Receiver
from trtllm_pp_progress.vllm.recording import _replacing
from trtllm_pp_progress.vllm.source import Source
from trtllm_pp_progress.vllm.timer import StreamTimer


def started(handler, delay=3, **more):
    receiver = Receiver(handler, delay, **more)
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
    receiver = Receiver(handler, 3)
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


def test_broadcasts_of_others_pass_while_a_receive_runs(posted, monkeypatch):
    """Other groups' are not held back; those of the handler's group are, however they are called."""
    stock = torch.distributed.broadcast

    def receive(self):
        group = self.broadcast_group
        torch.distributed.broadcast("by position", 3, group)
        torch.distributed.broadcast("with more", 3, group, False)
        torch.distributed.broadcast("another way", group=group, async_op=False)
        torch.distributed.broadcast("another group's", src=0, group=object())
        torch.distributed.broadcast("the default group's", src=0)
        self.queue[-1] = PendingRecv(self.broadcast_stream.record_event(), self.step)

    monkeypatch.setattr(PPHandler, "receive", receive)
    handler = PPHandler()
    receiver = started(handler)
    handler.get_prev_sampled_outputs()
    handler.receive()
    mine, others = ["by position", "with more", "another way"], ["another group's", "the default group's"]
    assert posted == others + mine  # the first receive goes out at once
    handler.get_prev_sampled_outputs()
    handler.receive()
    assert posted == others + mine + others
    receiver.flush("test")
    assert posted == others + mine + others + mine
    assert torch.distributed.broadcast is stock


def test_torch_has_its_own_function_again_after_an_error(posted, monkeypatch):
    """Whatever the handler raises, and wherever."""
    stock = torch.distributed.broadcast
    handler = PPHandler()
    started(handler)
    steps(handler, 2)
    monkeypatch.setattr(handler, "broadcast_stream", None)
    with pytest.raises(AttributeError):
        handler.receive()
    assert torch.distributed.broadcast is stock


def test_two_handlers_do_not_put_back_each_others_function(posted, monkeypatch):
    """A second thread's receive waits its turn, so that torch is as before whoever ends last."""
    stock, original = torch.distributed.broadcast, PPHandler.receive
    handlers = [PPHandler(), PPHandler()]
    entered, thread = [], threading.Thread(target=lambda: steps(handlers[1], 1))

    def receive(self, needed=True):
        assert _replacing.locked()
        entered.append(self)
        if self is handlers[0]:
            thread.start()
            assert entered == [self]
        return original(self, needed)

    monkeypatch.setattr(PPHandler, "receive", receive)
    for handler in handlers:
        started(handler)
    steps(handlers[0], 1)
    thread.join(10)
    assert entered == handlers
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


def test_a_receive_that_is_off_the_queue_is_posted_before_what_is_on_it(posted):
    """VLLM takes the oldest slot off before it waits; were it unposted by then, it would still go out in its turn."""
    handler = PPHandler()
    started(handler)
    steps(handler, 3)
    handler.queue.popleft()
    taken = handler.queue.popleft(), handler.queue.popleft()
    assert taken[1].event.query()
    assert posted == [(step, number) for step in (1, 2, 3) for number in (0, 1)]


def test_a_receive_whose_posting_failed_is_an_error_not_a_read(posted, monkeypatch):
    """Half of it may be out, so it is not repeated; using it raises, and what is younger can still be posted."""

    def broadcast(tensor, src, group):
        posted.append(tensor)
        if tensor == (2, 1):
            raise OSError("a peer is gone")

    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    handler = PPHandler()
    receiver = started(handler)
    steps(handler, 3)
    with pytest.raises(OSError, match="peer is gone"):
        receiver.flush("test")
    assert receiver.flush("test") == 1
    assert posted == [(step, number) for step in (1, 2, 3) for number in (0, 1)]
    with pytest.raises(RuntimeError, match="could not be posted"):
        handler.queue[-2].event.query()
    assert handler.queue[-1].event.query()


def test_an_error_in_the_middle_of_a_receive_leaves_no_peer_alone(posted, monkeypatch):
    """What the handler had issued by then goes out as it would have, behind everything older; the policy goes on."""
    handler = PPHandler()
    receiver = started(handler)
    steps(handler, 2)
    handler.get_prev_sampled_outputs()
    with monkeypatch.context() as patch:
        patch.setattr(Stream, "record_event", lambda self: 1 / 0 if len(posted) < 4 else Event([]))
        with pytest.raises(ZeroDivisionError):
            handler.receive()
    assert posted == [(step, number) for step in (1, 2, 3) for number in (0, 1)]
    steps(handler, 1)
    receiver.flush("test")
    assert posted[6:] == [(4, 0), (4, 1)]


@pytest.mark.parametrize("rides", [True, False])
def test_what_is_due_is_posted_on_the_broadcast_stream(posted, monkeypatch, rides):
    """From inside the handler's receive where that has made it current by then, else by making it current."""
    handler = PPHandler()
    stock = PPHandler.receive

    def receive(self, needed=True):
        with torch.cuda.stream(self.broadcast_stream if rides else self.main_stream):
            self.broadcast_stream.wait_stream(self.main_stream)
            return stock(self, needed)

    monkeypatch.setattr(PPHandler, "receive", receive)
    started(handler)
    steps(handler, 6)
    assert handler.broadcast_stream.issued == posted == [(step, number) for step in (1, 2, 3) for number in (0, 1)]
    assert handler.queue[0].event.covers == posted
    own = 1 if rides else 3  # the first of all is never due inside a receive
    assert len(handler.broadcast_stream.waited) == 6 + own


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
    assert counters["unready_at_consume"] == 7
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
    handler.needed = False
    assert handler.broadcast("tokens") == "sent"
    assert source.flush("idle") == 0
    counters = source.counters()
    assert (counters["broadcasts"], counters["draft_broadcasts"], counters["residency"]["count"]) == (1, 1, 2)
    assert counters["collectives"] == len(posted) == 3
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


class TestGivingUp:
    """What a watch does with a rank that stands still: everything out at once, past what is stuck, and for good."""

    def test_everything_is_posted_beside_the_stuck_streams(self, posted, monkeypatch):
        """On a stream of its own that waits for nothing; later work goes behind it, and events cover it."""
        made = []
        monkeypatch.setattr(torch.cuda, "Stream", lambda device=None, priority=0: made.append(Stream()) or made[-1])
        handler = PPHandler()
        receiver = started(handler)
        steps(handler, 3)
        waited = list(handler.broadcast_stream.waited)
        assert receiver.give_up("it stood still", 1.0) == 2
        (beside,) = made
        assert beside.waited == []
        assert beside.issued == posted[2:] == [(step, number) for step in (2, 3) for number in (0, 1)]
        assert handler.queue[-1].event.covers == beside.issued
        assert len(handler.broadcast_stream.waited) == len(waited) + 1  # for what was posted beside it
        assert not receiver.active

    def test_it_is_for_good(self, posted, monkeypatch):
        """The handler's own methods are back, and no later warm-up starts the policy again."""
        monkeypatch.setattr(torch.cuda, "Stream", lambda device=None, priority=0: Stream())
        handler = PPHandler()
        receiver = started(handler)
        steps(handler, 3)
        receiver.give_up("it stood still", 1.0)
        receiver.activate()
        assert (receiver.active, receiver.trouble) == (False, "it stood still")
        assert "receive" not in vars(handler)
        steps(handler, 2)
        assert [step for step, number in posted if number == 0] == [1, 2, 3, 4, 5]
        assert receiver.counters()["posts_by_reason"] == {"flush_stall": 2, "prime": 1}

    def test_a_step_in_the_middle_of_its_own_is_not_overtaken(self, posted, monkeypatch):
        """The order would be anybody's guess: nothing is posted then, and whoever asked is told."""
        handler = PPHandler()
        receiver = started(handler)
        steps(handler, 3)
        inside, leave, stock = threading.Event(), threading.Event(), PPHandler.receive

        def receive(self, needed=True):
            inside.set()
            assert leave.wait(10)
            return stock(self, needed)

        receiver.deactivate("test")
        monkeypatch.setattr(PPHandler, "receive", receive)
        receiver.activate()
        handler.get_prev_sampled_outputs()
        thread = threading.Thread(target=handler.receive)
        thread.start()
        assert inside.wait(10)
        assert receiver.give_up("it stood still", 0.01) == -1
        assert receiver.flush("quiet", patience_s=0.01) == 0
        assert receiver.active
        leave.set()
        thread.join(10)
        assert receiver.give_up("it stood still", 1.0) == 0  # the first of an activation is posted at once


def test_a_step_without_a_model_posts_what_is_due_at_its_end(posted):
    """Nothing follows on which it could ride, and a rank that waits for it may get no further step."""
    handler = PPHandler()
    receiver = started(handler, delay=2)
    steps(handler, 2)
    handler.get_prev_sampled_outputs()
    receiver.end_empty_step()
    assert [step for step, number in posted if number == 0] == [1]
    handler.get_prev_sampled_outputs()
    receiver.end_empty_step()
    assert [step for step, number in posted if number == 0] == [1, 2]
    counters = receiver.counters()
    assert counters["posts_by_reason"] == {"empty": 1, "prime": 1}
    assert counters["age_at_post"] == {0: 1, 2: 1}


def test_a_flush_may_keep_the_newest(posted):
    """As many as the transport takes anyhow."""
    handler = PPHandler()
    receiver = started(handler)
    steps(handler, 4)
    assert receiver.held == 3
    assert receiver.flush("test", keep=3) == 0
    assert receiver.flush("test", keep=1) == 2
    assert (posted[-1], receiver.held) == ((3, 1), 1)

"""Sends beside the tables: seen, driven and drained, and never blocked on by us."""

import pytest
from doubles.world import MPIDist, RequestBroadcaster, set_mpi_comm
from fakes import LIMIT_S, NEVER, FakeDist, FakeMultiHandleWrapper, FakeRequest, FakeWork

from trtllm_pp_progress._beside import SENDERS, watch
from trtllm_pp_progress._engine import Engine
from trtllm_pp_progress._settings import Settings


class Termination:
    """Disaggregated serving's vote on which requests may end, as far as its sends go."""

    def __init__(self, dist):
        self._dist, self._send_handle = dist, None

    def terminate_pending_requests(self):
        """Send the next vote, once the last one is sent."""
        if self._send_handle:
            self._send_handle.wait()
        self._send_handle = self._dist.isend_object({"ready": {}}, dest=self._dist.next_pp_rank, tag=20000)


@pytest.fixture
def engine(clock):
    """Return an engine on a fake clock whose posts are left to the driver."""
    made = Engine(Settings(max_polls=10, drain_deadline_s=1), clock=clock, pause=clock.pause)
    made.tests_at_post = lambda: 0
    return made


@pytest.fixture
def dist():
    """Return a rank that only sends."""
    return FakeDist(lambda: FakeRequest(NEVER))


def forward(engine, dist, monkeypatch, value="1"):
    """Return a watched broadcaster of the first rank that forwards without blocking."""
    monkeypatch.setenv("TRTLLM_PP_REQ_SEND_ASYNC", value)
    dist.is_first_pp_rank, dist.is_last_pp_rank = True, False
    return watch(engine, "request_broadcaster", RequestBroadcaster(dist))


def test_a_forwarded_request_is_pending_and_driven(engine, dist, monkeypatch):
    """NVIDIA/TensorRT-LLM#10665: it is known of from the moment it is sent, and seen complete."""
    sender = forward(engine, dist, monkeypatch)
    assert sender.broadcast(["request"]) == ["request"]
    (handle,) = dist.sent
    assert engine.pending
    assert not engine.drive()
    handle.complete()
    assert engine.drive()
    assert engine.status()["tables"]["request_broadcaster"]["completions"] == 1


def test_the_next_one_waits_for_the_one_before_without_blocking(engine, dist, monkeypatch):
    """Upstream's wait becomes the engine's."""
    sender = forward(engine, dist, monkeypatch)
    dist.make = lambda: FakeRequest(300)
    for _ in range(3):
        sender.broadcast(["request"])
    assert [(handle.seen, handle.waits) for handle in dist.sent] == [(True, 0), (True, 0), (False, 0)]


def test_a_wait_for_what_is_complete_touches_nothing(engine, dist, monkeypatch):
    """A request is not tested again after it said yes."""
    sender = forward(engine, dist, monkeypatch)
    dist.make = lambda: FakeRequest(1)
    sender.broadcast(["request"])
    assert engine.drive()
    sender.send_requests_handler.wait()
    assert dist.sent[0].tests == 1


def test_a_blocking_send_is_upstreams(engine, dist, monkeypatch):
    """Without the variable nothing is posted, and nothing is known."""
    dist.send_object = lambda *given: None
    sender = forward(engine, dist, monkeypatch, "0")
    sender.broadcast(["request"])
    assert sender.send_requests_handler is None
    assert not engine.pending


def test_a_termination_vote_is_tested_and_never_blocked_on(engine, dist):
    """NVIDIA/TensorRT-LLM#7455: the drain at the end has it in its list, and gives it up at the deadline."""
    sender = watch(engine, "_disagg_pp_termination_handler", Termination(dist))
    sender.terminate_pending_requests()
    assert not engine.drain()
    (handle,) = dist.sent
    assert (handle.waits, handle.tests > 2) == (0, True)
    assert [(kept.table, kept.slot) for kept in engine.abandoned] == [("disagg_pp_termination_handler", 0)]
    dist.make = lambda: FakeRequest(5)
    sender.terminate_pending_requests()
    sender.terminate_pending_requests()
    assert dist.sent[1].seen


def test_a_handle_that_cannot_be_tested_gets_upstreams_wait(engine, dist):
    """Once, and the slot is free for the next."""
    dist.make = lambda: FakeMultiHandleWrapper([FakeWork(0)])
    sender = watch(engine, "_disagg_pp_termination_handler", Termination(dist))
    sender.terminate_pending_requests()
    sender.terminate_pending_requests()
    assert (dist.sent[0].waits, dist.sent[1].waits) == (1, 0)


def test_no_handle_stays_no_handle(engine, dist):
    """Upstream's isend returns None on a single device."""
    dist.make = lambda: None
    sender = watch(engine, "request_broadcaster", RequestBroadcaster(dist))
    assert sender.dist.isend_object(1, 2, 3) is None


def test_the_communicator_is_upstreams_in_everything_else(engine):
    """Its type, its attributes, and what is set on it; the executor's own is not touched."""
    dist = MPIDist(4, 1)
    sender = watch(engine, "request_broadcaster", RequestBroadcaster(dist))
    assert isinstance(sender.dist, MPIDist)
    assert (sender.dist.pp_rank, sender.dist.next_pp_rank) == (1, 2)
    sender.dist.extra = LIMIT_S
    assert dist.extra == LIMIT_S
    assert "isend_object" not in vars(dist)


class Slotted:
    """A sender without a dict."""

    __slots__ = ("dist", "send_requests_handler")


@pytest.mark.parametrize("name", SENDERS)
@pytest.mark.parametrize(
    "sender", [None, 3, Slotted(), object(), type("Bare", (), {})()], ids=lambda s: type(s).__name__
)
def test_a_sender_of_another_shape_is_left_alone(engine, name, sender):
    """Nothing is exchanged, and no table is made."""
    assert watch(engine, name, sender) is sender
    assert engine.tables == {}
    set_mpi_comm(None)

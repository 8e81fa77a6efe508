"""Sends beside the tables: seen, driven and drained, and never blocked on by us."""

import threading
from types import SimpleNamespace

import pytest
from doubles.world import MPIDist, RequestBroadcaster, set_mpi_comm
from fakes import LIMIT_S, NEVER, FakeDist, FakeDriver, FakeMultiHandleWrapper, FakeRequest, FakeWork

from trtllm_pp_progress.progress.engine import Engine
from trtllm_pp_progress.pyexecutor.side_sends import SENDERS, watch
from trtllm_pp_progress.settings.core import Settings


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
    return Engine(Settings(max_polls=10, drain_deadline_s=1), driver=FakeDriver(), clock=clock, pause=clock.pause)


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
    assert engine.pending()
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
    assert not engine.pending()


def test_a_termination_vote_is_tested_and_never_blocked_on(engine, dist, kept):
    """NVIDIA/TensorRT-LLM#7455: while closing, the wait for one gives it up at the deadline, and the next one goes."""
    sender = watch(engine, "_disagg_pp_termination_handler", Termination(dist))
    sender.terminate_pending_requests()
    engine.close()
    dist.make = lambda: FakeRequest(5)
    sender.terminate_pending_requests()
    handle = dist.sent[0]
    assert (handle.waits, handle.tests > 2, [record.handle for record in kept]) == (0, True, [handle])
    assert [(given_up.table, given_up.slot) for given_up in engine.abandoned] == [("disagg_pp_termination_handler", 0)]
    sender.terminate_pending_requests()
    assert dist.sent[1].seen


def test_the_end_of_the_relay_lets_such_sends_go_too(engine, dist, monkeypatch, kept):
    """They are in tables like the others."""
    sender = watch(engine, "_disagg_pp_termination_handler", Termination(dist))
    sender.terminate_pending_requests()
    forward(engine, dist, monkeypatch).broadcast(["request"])
    engine.let_go()
    assert [record.handle for record in kept] == dist.sent
    assert not engine.pending()
    sender.terminate_pending_requests()  # nothing to wait for


def test_a_handle_that_cannot_be_tested_gets_upstreams_wait(engine, dist):
    """Once, and the slot is free for the next."""
    dist.make = lambda: FakeMultiHandleWrapper([FakeWork(0)])
    sender = watch(engine, "_disagg_pp_termination_handler", Termination(dist))
    sender.terminate_pending_requests()
    sender.terminate_pending_requests()
    assert (dist.sent[0].waits, dist.sent[1].waits) == (1, 0)


def test_a_wait_that_was_left_behind_leaves_the_next_send_alone(engine, dist, kept):
    """Upstream's wait goes on in a thread beyond the deadline; when it ends, another send is in the table."""
    received = threading.Event()
    dist.make = lambda: SimpleNamespace(wait=lambda: received.wait(LIMIT_S))  # no test
    sender = watch(engine, "_disagg_pp_termination_handler", Termination(dist))
    sender.terminate_pending_requests()
    engine.close()
    engine.clock.now += 2
    sender._send_handle.wait()
    (left_behind,) = [thread for thread in threading.enumerate() if thread.name == "pp-upstreams-wait"]
    later = engine.tables["disagg_pp_termination_handler"][0] = FakeRequest(NEVER)
    received.set()
    left_behind.join(LIMIT_S)
    assert not left_behind.is_alive()
    assert engine.tables["disagg_pp_termination_handler"][0] is later


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

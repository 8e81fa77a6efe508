"""Neighbouring stages find each other beside MPI, whoever else is there; clocks and hosts of ranks on one machine."""

import socket
import time

import pytest

from trtllm_pp_progress.tools.host import Transfer, connect, connect_pipeline
from trtllm_pp_progress.tools.job.clock import PreviousClock, read_previous, require_one_clock
from trtllm_pp_progress.tools.job.hosts import hosts_of_ranks

NOBODYS = "198.51.100.1"  # for documentation: no packet comes back

pytestmark = pytest.mark.mpi(min_size=2)


class Crowded:
    """A communicator of whose ranks' listeners strangers hear first."""

    def __init__(self, comm, strangers=(), word=None):
        self._comm, self._strangers, self._word = comm, strangers, word
        self.strangers = []

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def allgather(self, value):
        """Exchange addresses, ports and words; let the strangers speak, and only then let this rank go on."""
        found = self._comm.allgather(value)
        for said in self._strangers:
            self.strangers.append(socket.create_connection(("127.0.0.1", value[1])))
            self.strangers[-1].sendall(said)
        self._comm.Barrier()
        return [(addresses, port, self._word or word) for addresses, port, word in found]


def assert_connected(comm, before, after):
    """Assert that each rank hears the one before it."""
    rank, size = comm.Get_rank(), comm.Get_size()
    assert (before is None, after is None) == (rank == 0, rank == size - 1)
    if after is not None:
        after.sendall(bytes([rank]))
    if before is not None:
        before.settimeout(30)
        assert before.recv(1) == bytes([rank - 1])
    for connection in (before, after):
        if connection is not None:
            connection.close()


@pytest.mark.parametrize("strangers", [[], [b"GET / HTTP/1.1\r\n\r\n", b"", b"short"]], ids=["none", "some"])
def test_neighbours_are_connected(comm, strangers):
    """Strangers who say something else, or nothing, are not taken for one."""
    crowded = Crowded(comm, strangers)
    assert_connected(comm, *connect_pipeline(crowded))
    for stranger in crowded.strangers:
        stranger.close()


def test_an_address_that_leads_nowhere_does_not_hold_up_the_others(comm, monkeypatch):
    """All are tried at once: the connection is there long before that address is given up."""
    monkeypatch.setattr(connect, "addresses", lambda network: [NOBODYS, "127.0.0.1"])
    started = time.monotonic()
    assert_connected(comm, *connect_pipeline(comm))
    assert time.monotonic() - started < connect.LIMIT_S


def test_a_rank_that_is_not_found_is_said_with_what_was_tried(comm, monkeypatch):
    """Whoever answers there does not know the word; both sides fail."""
    monkeypatch.setattr(connect, "LIMIT_S", 3.0)
    last = comm.Get_rank() == comm.Get_size() - 1
    said = r"did not connect" if last else r"cannot be reached.* tried .*127\.0\.0\.1"
    with pytest.raises(ConnectionError, match=said):
        connect_pipeline(Crowded(comm, word=b"?" * connect.WORD))
    comm.Barrier()


def test_a_network_leaves_its_own_addresses():
    """The loopback's is first where nothing is named; a word that is none is refused."""
    assert connect.addresses()[0] == "127.0.0.1"
    assert connect.addresses("127.0.0.0/8") == ["127.0.0.1"]
    assert connect.addresses("203.0.113.0/24") == []
    with pytest.raises(ValueError, match="nonsense"):
        connect.addresses("nonsense")


def test_ranks_of_one_machine_share_a_clock_and_a_host(comm):
    """Nothing is aligned there, and one clock is what there is."""
    clock = PreviousClock(read_previous(comm), read_previous(comm))
    assert clock.same
    assert 0 < clock.before.error < 30
    require_one_clock(comm, "this test")
    assert hosts_of_ranks(comm) == [socket.gethostname()] * comm.Get_size()


def test_a_clock_of_its_own_is_seen(comm, monkeypatch):
    """The last rank's is an hour ahead: the first sees that, and the last the contrary of it where there are two."""
    rank, size = comm.Get_rank(), comm.Get_size()
    real, ahead = time.monotonic, 3600.0 if rank == size - 1 else 0.0
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: real() + ahead)
        before = read_previous(comm)
        moment = comm.sendrecv(time.monotonic(), (rank + 1) % size, source=(rank - 1) % size)
        clock = PreviousClock(before, read_previous(comm))
        now = time.monotonic()
    due = {0: 3600.0, size - 1: -3600.0}.get(rank, 0.0)
    assert clock.before.ahead == pytest.approx(due, abs=clock.before.error)
    assert clock.same == (due == 0)
    assert now - 60 < clock.here(moment) - clock.error
    assert clock.here(moment) <= now + clock.error


def test_a_transfer_lasts_from_when_both_sides_had_posted():
    """By the receiver's clock, and never less than nothing."""
    assert Transfer(1.0, 2.0, 5.0).parked_s() == 3.0
    assert Transfer(3.0, 2.0, 5.0).parked_s() == 2.0
    assert Transfer(3603.0, 2.0, 5.0).parked_s(lambda there: there - 3600) == 2.0
    assert Transfer(3603.0, 2.0, 5.0).parked_s() == 0.0

"""What carried the bytes, from the kernel's counters."""

import socket

import pytest

from trtllm_pp_progress.tools.bench import floor
from trtllm_pp_progress.tools.job import carrier as _carrier
from trtllm_pp_progress.tools.job.carrier import Counted, carrier, counted, mislabelled

MB = 1_000_000


def test_case_68_bytes_over_tcp_are_counted_on_the_receiver(monkeypatch):
    """By the kernel, for this process's connections: nothing that MPI says is needed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
    with sender, receiver:
        before, due = counted(), MB
        sender.settimeout(30)
        for _ in range(MB // 50_000):
            sender.sendall(bytes(50_000))
            while receiver.recv(50_000, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b"":
                pass
            due -= len(receiver.recv(50_000, socket.MSG_WAITALL))
        assert due == 0
        assert counted().tcp - before.tcp == MB


def test_an_rdma_port_counts_words_and_efa_bytes(tmp_path, monkeypatch):
    """Each where its driver has it; what cannot be read counts nothing."""
    monkeypatch.setattr(_carrier, "PORTS", tmp_path)
    for name, text in (("mlx5_0/ports/1/counters/port_rcv_data", "25"), ("efa_0/ports/1/hw_counters/rx_bytes", "7\n")):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "mlx5_1/ports/1/counters").mkdir(parents=True)
    (tmp_path / "mlx5_1/ports/1/counters/port_rcv_data").write_text("N/A")
    assert counted().rdma == 4 * 25 + 7


@pytest.mark.parametrize(
    ("tcp", "rdma", "same_host", "found"),
    [
        (MB, 0, True, "tcp"),
        (MB, 0, False, "tcp"),
        (1000, MB, False, "rdma"),
        (1000, 0, True, "memory"),
        (1000, 0, False, "unknown"),
    ],
)
def test_case_68_who_counted_them_carried_them(tcp, rdma, same_host, found):
    """A launcher's own traffic is no sign of it."""
    assert carrier(Counted(5, 5), Counted(5 + tcp, 5 + rdma), MB, same_host) == found


@pytest.mark.parametrize(
    ("transport", "carried", "right"),
    [
        ("tcp", "tcp", True),
        ("tcp", "memory", False),
        ("tcp", "rdma", False),
        ("tcp", "unknown", False),
        ("shm", "memory", True),
        ("shm", "tcp", False),
        ("default", "tcp", True),
        ("default", "unknown", True),
    ],
)
def test_case_79_a_run_is_called_after_what_carried_it(transport, carried, right):
    """ofiwg/libfabric#11974: an MPI over libfabric heeds no UCX_TLS."""
    said = mislabelled(transport, carried)
    assert (said is None) == right
    assert right or said.startswith(f"{transport} was asked for, but ")


class Turns:
    """A communicator of which one rank is looked at: what it does, in turn."""

    def __init__(self, rank, did):
        self._rank, self._did = rank, did

    def Get_rank(self):
        """Return the rank that is looked at."""
        return self._rank

    def Send(self, message, dest):
        """Note how long the message is."""
        self._did.append(("sends", len(message[0])))

    def Recv(self, message, source):
        """Note how long the message is."""
        self._did.append(("receives", len(message[0])))

    def allgather(self, value):
        """Return two hosts' names."""
        return [value, value]

    def bcast(self, value, root):
        """Return what the other rank would say."""
        return "tcp"


def test_an_eager_send_is_not_counted_before_it_is_looked_for(monkeypatch):
    """Its bytes reach the receiver's kernel at once: the receiver has read its counters when the sender begins."""
    for rank, expected in (
        (0, ["counts", ("receives", 1), ("sends", floor.LABEL_BYTES), "counts"]),
        (1, ["counts", ("sends", 1), ("receives", floor.LABEL_BYTES), "counts"]),
    ):
        did = []
        monkeypatch.setattr(floor, "counted", lambda did=did: did.append("counts") or Counted(0, 0))
        assert floor.label(Turns(rank, did), "tcp") == "tcp"
        assert did == expected

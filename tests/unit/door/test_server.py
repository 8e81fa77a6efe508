"""The door: who knocks is answered or refused, in bounded time and size, and nobody keeps it from the next."""

import gc
import json
import os
import re
import socket
import stat
import struct
import threading
import time

import pytest

from trtllm_pp_progress.door import server
from trtllm_pp_progress.door.client import ask
from trtllm_pp_progress.door.place import DoorError, doors
from trtllm_pp_progress.door.server import MOST_BYTES, Door

LIMIT_S = 30  # only a fault makes a wait reach it


def knock(door, data=b"", end=True):
    """Say anything at a door, and return a connection that has said it."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(LIMIT_S)
    client.connect(str(door.path))
    try:
        client.sendall(data)
        if end:
            client.shutdown(socket.SHUT_WR)
    except BrokenPipeError:
        pass  # it has heard enough
    return client


def heard(client):
    """Return all that a door says until it hangs up."""
    said = b""
    with client:
        try:
            while piece := client.recv(65536):
                said += piece
        except ConnectionResetError:
            pass  # it did not read all
    return said


def threads():
    """Return the threads of doors."""
    return [thread for thread in threading.enumerate() if thread.name == "pp-door"]


def test_it_answers_what_it_is_asked(door):
    """With its process, from a socket that is for this user alone."""
    assert ask(door.path, order="status", n=1) == {
        "schema": 1,
        "pid": os.getpid(),
        "echo": {"order": "status", "n": 1},
    }
    assert stat.S_IMODE(door.path.stat().st_mode) == 0o600
    assert doors() == {os.getpid(): door.path}


def test_every_patch_of_the_process_has_its_say(door):
    """At one door."""
    door.add("two", lambda request: 2)
    assert ask(door.path)["two"] == 2
    assert len(threads()) == 1


@pytest.mark.parametrize(
    ("said", "refusal"),
    [
        (b"\n", "JSONDecodeError"),
        (b"", "JSONDecodeError"),
        (b"{", "JSONDecodeError"),
        (b"\xff\xfe\n", "Unicode"),
        (b"[]\n", "list where an object is expected"),
        (b'"status"\n', "str where an object is expected"),
        (b"7\n", "int where an object is expected"),
        (b"[" * 4000 + b"\n", "RecursionError|JSONDecodeError"),
        (b"x" * (MOST_BYTES + 1), "at most 4096 bytes"),
        (b"{" + b" " * 100_000 + b"}\n", "at most 4096 bytes"),
    ],
)
def test_what_is_no_request_is_refused_with_the_reason(said, refusal, door):
    """And the next one is answered."""
    told = json.loads(heard(knock(door, said)))
    assert told["pid"] == os.getpid()
    assert re.search(refusal, told["error"])
    assert ask(door.path, n=2)["echo"] == {"n": 2}


@pytest.mark.parametrize("answer", [lambda request: 1 / 0, lambda request: object()], ids=["raises", "no JSON"])
def test_an_answer_that_fails_is_an_error_for_who_asked(answer, door):
    """Not the end of the door."""
    door.add("broken", answer)
    for _ in range(2):
        with pytest.raises(DoorError, match=r"ZeroDivisionError|TypeError"):
            ask(door.path)


def test_ten_thousand_senseless_requests_change_nothing(door):
    """Half of them oversized."""
    for number in range(10_000):
        said = heard(knock(door, b"nonsense\n" if number % 2 else b"x" * (MOST_BYTES + 1)))
        assert b'"error"' in said
    assert ask(door.path, n=3)["echo"] == {"n": 3}
    assert len(threads()) == 1


@pytest.mark.parametrize("drips", [False, True], ids=["silent", "a byte at a time"])
def test_a_slow_client_is_dropped_and_the_next_one_answered(drips, door, monkeypatch):
    """Its time is for the whole request, not for each byte."""
    monkeypatch.setattr(server, "PATIENCE_S", 0.2)
    client = knock(door, b"{", end=False)
    dripping = threading.Event()

    def drip():
        try:
            while not dripping.wait(0.02):
                client.sendall(b" ")
        except OSError:
            pass

    dripper = threading.Thread(target=drip)
    if drips:
        dripper.start()
    assert ask(door.path, timeout_s=LIMIT_S, n=4)["echo"] == {"n": 4}
    dripping.set()
    if drips:
        dripper.join()
    assert heard(client) == b""


def test_a_client_that_does_not_listen_is_dropped(door, monkeypatch):
    """An answer larger than what the system keeps for it."""
    monkeypatch.setattr(server, "PATIENCE_S", 0.2)
    door.add("large", lambda request: "x" * 4_000_000 if request.get("large") else "")
    deaf = knock(door, b'{"large": true}\n')
    assert ask(door.path, timeout_s=LIMIT_S)["large"] == ""
    deaf.close()


class Stranger(socket.socket):
    """A connection whose other end is another user's, as the kernel says."""

    def getsockopt(self, *asked):
        """Answer for SO_PEERCRED."""
        assert asked == (socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return struct.pack("3i", 1, os.getuid() + 4711, 1)


def test_another_user_is_refused(door):
    """Before a word of his is read."""
    ours, his = socket.socketpair(socket.AF_UNIX)
    with his, Stranger(fileno=ours.detach()) as seen:
        door._attend(seen)
        told = json.loads(his.recv(4096))
    assert told["error"] == f"user {os.getuid() + 4711} may not ask here"
    assert "echo" not in told


def test_root_may_ask(door, monkeypatch):
    """As it may do anything else."""
    ours, his = socket.socketpair(socket.AF_UNIX)
    monkeypatch.setattr(Stranger, "getsockopt", lambda *asked: struct.pack("3i", 1, 0, 0))
    with his, Stranger(fileno=ours.detach()) as seen:
        his.sendall(b"{}\n")
        door._attend(seen)
        assert json.loads(his.recv(4096))["echo"] == {}


def test_closed_it_is_gone(door):
    """The file, and the thread; twice is harmless, and it may open again."""
    (thread,), path = threads(), door.path
    door.close()
    door.close()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert not path.exists()
    with pytest.raises(DoorError, match="does not answer"):
        ask(path)
    door.add("again", lambda request: True)
    assert ask(door.path)["again"] is True


def test_five_hundred_lives_leave_nothing(where):
    """No file, no thread, no descriptor."""
    gc.collect()  # what tests before this one have left
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(500):
        one = Door()
        one.add("echo", lambda request: request)
        one.close()
    for thread in threads():
        thread.join(LIMIT_S)
    assert list(where.iterdir()) == []
    assert threads() == []
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_forked_child_has_no_door_and_leaves_the_parents(door):
    """Its close removes nothing; it may open one of its own."""
    child = os.fork()
    if child == 0:
        fine = door._listener is None and door.path is None
        door.close()
        fine = fine and len(doors()) == 1
        door.add("child", lambda request: True)
        fine = fine and ask(door.path)["pid"] == os.getpid() and len(doors()) == 2
        door.close()
        os._exit(0 if fine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ask(door.path, n=5)["echo"] == {"n": 5}
    assert list(doors()) == [os.getpid()]


def test_without_a_free_descriptor_the_door_stays(door, monkeypatch):
    """It accepts again once there is one."""
    failing = iter([OSError("too many open files")])

    class Listener:
        """One that cannot accept."""

        def accept(self):
            """Fail once for want of a descriptor, then for good."""
            for error in failing:
                raise error
            door._listener = None  # closed meanwhile
            raise OSError("closed")

    pauses = []
    monkeypatch.setattr(server.time, "sleep", pauses.append)
    listener, real = Listener(), door._listener
    door._listener = listener
    door._serve(listener)
    door._listener = real
    assert pauses == [server.PATIENCE_S]


def test_nobody_at_the_door_is_an_error(where):
    """Within the time that was given."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        where.mkdir()
        silent.bind(str(where / "1-1.sock"))
        silent.listen()
        started = time.monotonic()
        with pytest.raises(DoorError, match=r"1-1\.sock does not answer"):
            ask(where / "1-1.sock", timeout_s=0.1)
        assert time.monotonic() - started < LIMIT_S

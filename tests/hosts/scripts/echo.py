"""SIZE bytes to host 2 and back by TCP, TURNS times, WINDOW datagrams before each: the ms that took, and what was lost.

What was sent before arrives before, so nothing has to be waited for with a timeout to know that it was lost.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time

PORT, LIMIT_S = 7, 30.0
WINDOW = 50


def drain(datagrams, use):
    """Give `use` every datagram that is there."""
    with contextlib.suppress(BlockingIOError):
        while True:
            use(*datagrams.recvfrom(2048))


def exactly(stream, size):
    """Return so many bytes of a stream; fewer where it has ended."""
    data = b""
    while len(data) < size and (chunk := stream.recv(size - len(data))):
        data += chunk
    return data


def serve(size):
    """Send everything back until the stream ends."""
    with socket.create_server(("", PORT)) as listener, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(("", PORT))
        datagrams.setblocking(False)
        stream, _address = listener.accept()
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := exactly(stream, size):
            drain(datagrams, datagrams.sendto)
            stream.sendall(data)


def connect(address):
    """Return a stream to the server, which may not listen yet."""
    ends = time.monotonic() + LIMIT_S
    while True:
        try:
            return socket.create_connection(address, LIMIT_S)
        except ConnectionRefusedError:
            if time.monotonic() > ends:
                raise
            time.sleep(0.02)


def measure(address, size, turns):
    """Return what is printed."""
    took, back = [], []
    with connect(address) as stream, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        datagrams.setblocking(False)
        for _ in range(turns):
            for _ in range(WINDOW):
                datagrams.sendto(bytes(100), address)
            started = time.perf_counter()
            stream.sendall(bytes(size))
            assert len(exactly(stream, size)) == size
            took.append((time.perf_counter() - started) * 1e3)
            drain(datagrams, lambda *got: back.append(got))
    return {"sent": turns * WINDOW, "lost": turns * WINDOW - len(back), "ms": took}


if sys.argv[1] == "serve":
    serve(int(sys.argv[2]))
else:
    peer = (os.environ["HOSTS_ADDRESSES"].split()[1], PORT)
    with subprocess.Popen([os.environ["HOSTS_ENTER"], "2", sys.executable, __file__, "serve", sys.argv[1]]):
        print(json.dumps(measure(peer, *map(int, sys.argv[1:]))))

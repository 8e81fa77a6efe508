"""Words between ranks beside MPI: who waits here is outside MPI and makes no send progress."""

import contextlib
import socket

LIMIT_S = 60.0  # only a fault makes a wait reach it


class Line:
    """A TCP connection between every two ranks of a communicator; made by all ranks at once, on the main thread."""

    def __init__(self, comm):
        """Connect each rank with all others; every wait ends with an error after LIMIT_S."""
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        with socket.create_server(("127.0.0.1", 0), backlog=self.size) as listener:
            listener.settimeout(LIMIT_S)
            ports = comm.allgather(listener.getsockname()[1])
            self._to = {}
            for peer in range(self.rank):
                self._to[peer] = socket.create_connection(("127.0.0.1", ports[peer]), timeout=LIMIT_S)
                self._to[peer].sendall(bytes([self.rank]))
            for _ in range(self.rank + 1, self.size):
                connection, _address = listener.accept()
                connection.settimeout(LIMIT_S)
                self._to[self._exactly(connection, 1)[0]] = connection

    def tell(self, peer, word=0):
        """Send a number to a rank."""
        self._to[peer].sendall(word.to_bytes(8, "big"))

    def hear(self, peer, timeout=LIMIT_S):
        """Return the next number from a rank, or None where it did not come in time."""
        self._to[peer].settimeout(timeout)
        with contextlib.suppress(TimeoutError):
            return int.from_bytes(self._exactly(self._to[peer], 8), "big")
        return None

    def meet(self):
        """Return once every rank is here."""
        for peer in self._to:
            self.tell(peer)
        for peer in self._to:
            assert self.hear(peer) is not None, f"rank {peer} did not come"

    def close(self):
        """Give the connections up."""
        for connection in self._to.values():
            connection.close()

    @staticmethod
    def _exactly(connection, count):
        data = b""
        while len(data) < count:
            chunk = connection.recv(count - len(data))
            if not chunk:
                raise ConnectionError("the other rank is gone")
            data += chunk
        return data

"""A receive while its sender holds the GIL, in C, so that no Python of it runs."""

import ctypes
import mmap
import time
from pathlib import Path

from native_parts import LIMIT_S

SIZE = 1_000_000
HOLD_MS = 500  # for what must not be received
LATE_S = 0.02


def received_while_held(folder, comm, line, shared, post, expected=True):
    """Return on rank 0, which holds the GIL from post(bytes) until rank 1 has them, whether that came true.

    post() returns what ends the send; on rank 1 it gets None instead of bytes, LATE_S later, and receives them.
    `folder` has the counting stand-in, `shared` both ranks can see. Unless it is `expected`, HOLD_MS are enough.
    """
    path = Path(shared, "received")
    if comm.rank == 0:
        path.write_bytes(bytes(mmap.PAGESIZE))
    line.meet()
    done = None
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE) as page:
        word = ctypes.c_int.from_buffer(page)
        try:
            if comm.rank == 0:
                hold_until = ctypes.PyDLL(str(folder / "counter.so")).hold_until
                finish = post(bytes(SIZE))
                line.tell(1)
                done = bool(hold_until(ctypes.byref(word), int(LIMIT_S * 1e3) if expected else HOLD_MS))
                finish()
            elif comm.rank == 1:
                line.hear(0)
                time.sleep(LATE_S)  # the scenario's late receiver
                assert len(post(None)) == SIZE
                word.value = 1
            line.meet()
        finally:
            del word  # or the page cannot be closed
    return done

"""Where a hop's time goes: from two buffers in a hot loop to a relay's hop, one thing more at each line.

    python perf hop [--payload 65536] [--transport tcp] [--json FILE]      # starts mpirun itself, two ranks

Rank 0 sends, rank 1 receives; a line's figure is one way, from just before the send to the end of the receive, by the
clock that two processes of one machine share. What a line adds to the one before is what that thing costs.
"""

from __future__ import annotations

import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

import output
from trtllm_pp_progress.tools.job.clock import require_one_clock
from trtllm_pp_progress.tools.job.launch import TRANSPORTS, rank_or_launch
from trtllm_pp_progress.tools.job.options import JSON_FILE, Names, run_command
from trtllm_pp_progress.tools.job.world import world

PAUSE_S = 0.008  # a step of the steady ring: three stages of 2 ms, and some
HANDLING_S = 2e-4  # what the executor thread does in Python when a batch comes back
WARMUP = 5
NEVER_SENT = 20100

LADDER = {  # what each line adds, and what would close it
    "buffers, hot": ("the wire", "nothing: this is the floor"),
    "pkl5, hot": ("pickle, and a header before the data", "one message with the size in it; a reused buffer"),
    "pkl5, after a pause": ("cold caches, a receiver that has waited for long", "nothing here: that is decoding"),
    "by a relay thread": ("two threads that wait for one another", "a relay that needs no thread (upstream's inline)"),
    "and the executor is woken first": ("GIL hand-over: it runs while the relay posts", "post first, wake afterwards"),
    "flush relay": ("the rest of the ring: scheduling, checks, counting", "see polls and CPU in the bench"),
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--payload", default=65536, show_default=True, type=click.IntRange(1, 1 << 28), help="Bytes.")
@click.option("--transport", default="tcp", show_default=True, type=Names("transport", tuple(TRANSPORTS)))
@click.option("--rounds", default=200, show_default=True, type=click.IntRange(10), help="Sends timed on each line.")
@click.option("--json", "json_file", type=JSON_FILE, help="Write the figures here.")
@click.option("--timeout", default=300.0, show_default=True, help="Seconds for the ranks.")
def command(payload: int, transport: list[str], rounds: int, json_file: Path | None, timeout: float) -> None:
    """Measure the ladder and print it."""
    rank_or_launch(2, transport[0], sys.argv, timeout, json_file)  # ranks are started by this same command
    with world(2) as comm:
        require_one_clock(comm, "python perf hop")
        lines, pieces = _ladder(comm, payload, rounds), _pieces(comm, payload)
        if comm.Get_rank() == 1:  # the receiver's clock
            _report(lines, pieces, payload, transport[0], json_file)


def _ladder(comm: Any, payload: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Return p50 and p99 in milliseconds of each line, on both ranks."""
    from mpi4py.util import pkl5

    from trtllm_pp_progress.tools.bench.floor import floor
    from trtllm_pp_progress.tools.bench.measure import run
    from trtllm_pp_progress.tools.bench.rows import quantile
    from trtllm_pp_progress.tools.host import RingStage, connect_pipeline

    rank = comm.Get_rank()
    plain = comm.bcast(floor(comm, payload))
    lines = {
        "buffers, hot": (plain.buffers_ms_p50, plain.buffers_ms_p99),
        "pkl5, hot": (plain.pkl5_ms_p50, plain.pkl5_ms_p99),
    }
    objects, data = pkl5.Intracomm(comm.Dup()), bytes(payload)

    def send() -> None:
        objects.isend((time.monotonic(), data), dest=1).wait()

    def receive() -> float:
        posted, _ = objects.recv(source=0)
        return time.monotonic() - posted

    for name, transfer in (
        ("pkl5, after a pause", _plainly),
        ("by a relay thread", _by_thread),
        ("and the executor is woken first", _woken_first),
    ):
        took = transfer(send if rank == 0 else receive, WARMUP + rounds, rank == 0)[WARMUP:]
        took = comm.bcast(took, root=1)
        lines[name] = tuple(quantile(took, q) * 1e3 for q in (0.5, 0.99))  # type: ignore[assignment]
    outcome = run(comm, "flush", lambda: RingStage(*connect_pipeline(comm), PAUSE_S / 2, payload), [[0]], rounds)
    parked = comm.bcast(outcome.ranks[0].parked_ms if outcome else None)
    lines["flush relay"] = (quantile(parked, 0.5), quantile(parked, 0.99))
    return lines


def _plainly(transfer: Callable[[], Any], rounds: int, sends: bool) -> list[Any]:
    took = []
    for _ in range(rounds):
        if sends:
            time.sleep(PAUSE_S)
        took.append(transfer())
    return took


def _by_thread(transfer: Callable[[], Any], rounds: int, sends: bool, wake_first: bool = False) -> list[Any]:
    """Let a relay thread transfer; the calling thread is the executor: it waits for it, then handles the batch."""
    batches: queue.Queue[int] = queue.Queue()
    done: queue.Queue[Any] = queue.Queue()
    took = []

    def relay() -> None:
        for _ in range(rounds):
            batches.get()
            if wake_first and sends:
                done.put(None)
                transfer()
            else:
                done.put(transfer())

    thread = threading.Thread(target=relay)
    thread.start()
    for number in range(rounds):
        if sends:
            time.sleep(PAUSE_S)
        batches.put(number)
        took.append(done.get())
        until = time.perf_counter() + HANDLING_S
        while time.perf_counter() < until:
            pass
    thread.join()
    return took


def _woken_first(transfer: Callable[[], Any], rounds: int, sends: bool) -> list[Any]:
    return _by_thread(transfer, rounds, sends, wake_first=True)


def _pieces(comm: Any, payload: int) -> dict[str, float]:
    """Return what single pieces take on an otherwise idle process, medians in microseconds."""
    from mpi4py import MPI
    from mpi4py.util import pkl5

    data = bytes(payload)
    state = (0.0, data)
    dumped = pkl5.pickle.dumps_oob(state)
    pieces = {
        "pickle": _microseconds(lambda: pkl5.pickle.dumps_oob(state)),
        "unpickle": _microseconds(lambda: pkl5.pickle.loads_oob(*dumped)),
        "probe": _microseconds(lambda: comm.Iprobe(source=MPI.ANY_SOURCE, tag=NEVER_SENT)),
        "thread wake-up": _wake_up(),
    }
    if comm.Get_rank() == 0:
        pending = pkl5.Intracomm(comm).isend(bytes(1 << 20), dest=1, tag=1)
        pieces["test of a pending send"] = _microseconds(pending.test, 50)
        comm.Send(bytearray(1), dest=1, tag=2)
        pending.wait()
    else:
        while not comm.Iprobe(source=0, tag=2):
            time.sleep(0.001)
        comm.Recv(bytearray(1), source=0, tag=2)
        pkl5.Intracomm(comm).recv(source=0, tag=1)
    return dict(comm.bcast(pieces))


def _microseconds(call: Callable[[], Any], times: int = 300) -> float:
    took = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        took.append(time.perf_counter() - started)
    return statistics.median(took) * 1e6


def _wake_up(times: int = 200) -> float:
    """Return the median time from a put to the return of the get that waits for it, while the putting thread sleeps."""
    batches: queue.Queue[float] = queue.Queue()
    took: list[float] = []

    def wait() -> None:
        for _ in range(times):
            put = batches.get()
            took.append(time.perf_counter() - put)

    thread = threading.Thread(target=wait)
    thread.start()
    for _ in range(times):
        time.sleep(0.001)
        batches.put(time.perf_counter())
    thread.join()
    return statistics.median(took) * 1e6


def _report(
    lines: dict[str, tuple[float, float]],
    pieces: dict[str, float],
    payload: int,
    transport: str,
    json_file: Path | None,
) -> None:
    from trtllm_pp_progress.tools.job.environment import environment

    described = environment(transport)
    before, rows = 0.0, []
    for name, (p50, p99) in lines.items():
        rows.append((name, *LADDER[name], f"{p50:.3f}", f"{p50 - before:+.3f}", f"{p99:.3f}"))
        before = p50
    print(output.described(described))
    print(f"one hop, {payload:,} bytes, one way")
    print(output.table(("line", "what it adds", "what would close it", "p50 ms", "adds", "p99 ms"), rows, left=3))
    print("pieces, us: " + ", ".join(f"{name} {took:.1f}" for name, took in pieces.items()))
    if json_file is not None:
        output.write(json_file, environment=described, payload_bytes=payload, lines_ms=lines, pieces_us=pieces)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; bad input is one line on stderr and exit code 2."""
    run_command(command, arguments)

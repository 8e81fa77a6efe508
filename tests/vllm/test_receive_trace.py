"""The trace reader, on small traces of both kinds with known times."""

from __future__ import annotations

import gzip
import json
import sqlite3
from pathlib import Path

import pytest

from receive import trace
from receive.trace_files import read

RECORDED = Path(__file__).resolve().parents[2] / "perf" / "results" / "h200-residency.trace.json.gz"

# Ten steps of 1000 us. Each runs a kernel of 400 us, or of 500 us beside a broadcast, and another of 400 us.
# The unit of step T is launched 900 us into it and resident until 51 us into step T + 2.
STEPS = [1000.0 * number for number in range(10)]
MAIN, SIDE = 7, 20


def kernels():
    """Return (name, stream, posted, start, end) of every kernel."""
    for number, step in enumerate(STEPS):
        yield "gemm", MAIN, step, step + 60, step + 60 + (500 if number else 400)
        yield "other", MAIN, step + 1, step + 570, step + 970
        for part in (0, 1):
            yield "ncclDevKernel_Broadcast_RING_LL", SIDE, step + 900 + part, step + 980 + part, step + 2050 + part


@pytest.fixture(params=["torch", "torch.gz", "nsys"])
def path(request, tmp_path):
    """Return the same trace in every kind of file."""
    if request.param == "nsys":
        return write_nsys(tmp_path / "trace.sqlite")
    events = [{"ph": "M", "name": "process_name"}]
    for number, (name, stream, posted, start, end) in enumerate(kernels()):
        events.append(
            {
                "ph": "X",
                "cat": "kernel",
                "name": name,
                "ts": start,
                "dur": end - start,
                "args": {"stream": stream, "correlation": number},
            }
        )
        events.append(
            {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "ts": posted,
                "dur": 2,
                "args": {"correlation": number},
            }
        )
    events += [
        {"ph": "X", "cat": "user_annotation", "name": "execute_context_0(0)_generation_4(4)", "ts": step, "dur": 9}
        for step in STEPS
    ]
    events.append({"ph": "X", "cat": "user_annotation", "name": "something else", "ts": 1, "dur": 9})
    text = json.dumps({"traceEvents": events, "distributedInfo": {"rank": 0}})
    file = tmp_path / ("rank0.pt.trace.json" + (".gz" if request.param == "torch.gz" else ""))
    file.write_bytes(gzip.compress(text.encode()) if request.param == "torch.gz" else text.encode())
    return file


def write_nsys(file):
    """Write the tables of an nsys export that the reader uses; times in nanoseconds."""
    with sqlite3.connect(file) as base:
        base.executescript(
            "CREATE TABLE StringIds (id INTEGER, value TEXT);"
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT, streamId INT,"
            " correlationId INT, globalPid INT, demangledName INT);"
            "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, globalTid INT, correlationId INT,"
            " nameId INT);"
            "CREATE TABLE NVTX_EVENTS (start INT, end INT, globalTid INT, text TEXT, textId INT);"
        )
        process, thread = 42 * 0x1000000, 42 * 0x1000000 + 43
        names = sorted({name for name, *_ in kernels()})
        base.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(names))
        for number, (name, stream, posted, start, end) in enumerate(kernels()):
            times = [int(time * 1000) for time in (posted, start, end)]
            base.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, ?, ?, ?, ?)",
                (times[1], times[2], stream, number, process, names.index(name)),
            )
            base.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, 0)",
                (times[0], times[0] + 2000, thread, number),
            )
            # Another process with the same correlation numbers must not be mixed up with this one.
            base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (1, 2, ?, ?, 0)", (99 * 0x1000000, number))
        base.executemany(
            "INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, 'execute_generation', NULL)",
            [(int(step * 1000), int(step * 1000) + 9, thread) for step in STEPS],
        )
    base.close()
    return file


def test_every_column(path):
    """Post time, lifetime, readiness and both kinds of model time come out as they were put in."""
    (rank,) = read(path)
    found = trace.report(rank, pp=4)
    assert found.units == 10
    assert found.post == pytest.approx(900)
    assert found.lifetime == pytest.approx(2 * 1070)
    assert (found.ready_next, found.ready_consume) == (0.0, 1.0)
    assert found.blocked == 0.0
    assert found.model_alone == pytest.approx(400)
    assert found.model_beside == pytest.approx((500 + 400) / 2)
    assert found.slowdown == pytest.approx(900 / 800)


def test_the_wait_of_a_result_that_is_late(path):
    """With pp 2 the unit of T ends 51 us into T + 2, and the main stream stands still for that."""
    (rank,) = read(path)
    found = trace.report(rank, pp=2)
    assert found.ready_consume == 0.0
    assert found.blocked == pytest.approx(51)


def test_deferred_units_belong_to_the_step_that_saved_them(path):
    """With an age of one step, posting is 1900 us after T began, and a step is nearer to T + pp."""
    (rank,) = read(path)
    found = trace.report(rank, pp=3, age=1)
    assert found.post == pytest.approx(1900)
    assert found.ready_consume == 0.0


def test_a_line_for_each_rank(path, capsys):
    """The command prints a header and a row."""
    assert trace.main([str(path), "--pp", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "100%" in lines[2]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize("content", ["", "{}", "[]", "nonsense"])
def test_a_file_that_is_no_trace(tmp_path, capsys, content):
    """It is named, with what is wrong, and the command returns 2."""
    file = tmp_path / "a.json"
    file.write_text(content)
    assert trace.main([str(file), "--pp", "4"]) == 2
    assert "a.json" in capsys.readouterr().out


def test_a_trace_without_steps_or_without_tables(path, tmp_path, capsys):
    """What is missing is said with the option or the recording flag that brings it."""
    assert trace.main([str(path), "--pp", "4", "--step", "nothing"]) == 2
    assert "--step" in capsys.readouterr().out
    empty = tmp_path / "empty.sqlite"
    with sqlite3.connect(empty) as base:
        base.execute("CREATE TABLE StringIds (id INTEGER)")
    base.close()
    assert trace.main([str(empty), "--pp", "4"]) == 2
    assert "--trace=cuda,nvtx" in capsys.readouterr().out


def test_a_real_profiler_trace():
    """A trace that the H200 wrote reads like the made ones: steps, kernels on two streams, and launches for both."""
    (rank,) = read(RECORDED)
    found = trace.report(rank, pp=4, per_step=1)
    assert found.units > 5
    assert found.model_alone > 0

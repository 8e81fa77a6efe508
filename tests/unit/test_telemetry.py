"""Prometheus metrics: names as Prometheus wants them, every counter there, and nothing of it at import."""

import builtins
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import LIMIT_S, SLOTS, executor_class, join
from prometheus_client import CollectorRegistry, generate_latest

import trtllm_pp_progress
from trtllm_pp_progress import telemetry

RECEIVER = {
    "rank": 0, "role": "receiver", "active": True, "steps": 41, "stalls": 1, "stalled_s": 2.5,
    "counters": {
        "posts": 40, "catch_ups": 3, "fallbacks": 1, "flushes": 2, "posts_by_reason": {"due": 35, "flush_idle": 5},
        "age_at_post": {2: 35, 3: 5}, "skipped": 4, "consumed": 38, "unready_at_consume": 6,
        "waited": {"count": 6, "total_ms": 12.0, "longest_ms": 7.0, "dropped": 0},
    },
}  # fmt: skip
SOURCE = {
    "rank": 3, "role": "source", "active": True, "steps": 41, "stalls": 0, "stalled_s": 0.0,
    "counters": {
        "broadcasts": 40, "draft_broadcasts": 39,
        "residency": {"count": 39, "total_ms": 1500.0, "longest_ms": 90.0, "dropped": 0},
    },
}  # fmt: skip


def text():
    """Return a scrape, with the collector in a registry of its own."""
    registry = CollectorRegistry()
    telemetry.register(registry)
    return generate_latest(registry).decode()


@pytest.fixture
def workers(monkeypatch):
    """Let the process have two workers of vLLM."""
    found = [RECEIVER, SOURCE]
    fake = SimpleNamespace(status=lambda: {"installed": True, "refused": [], "workers": found})
    monkeypatch.setitem(sys.modules, "trtllm_pp_progress.vllm", fake)
    return found


def test_a_ring_is_exported_as_it_is_counted(monkeypatch):
    """What a patched executor's status says is what a scrape says, table by table."""
    monkeypatch.delitem(sys.modules, "trtllm_pp_progress.vllm", raising=False)
    cls = executor_class("E")
    with trtllm_pp_progress.install(cls):
        executor = cls()
        executor.start_worker()
        for batch in range(3):
            executor.executed_batch_queue.put(batch % SLOTS)
        for _ in range(3):
            executor.executed_batch_response_queue.get(timeout=LIMIT_S)
        executor.executed_batch_queue.put(None)
        join(executor.handler)
        tables = trtllm_pp_progress.status()["installed"][0]["executors"][0]["tables"]
        scrape = text()
    assert any(found["posts"] for found in tables.values())
    for table, found in tables.items():
        for key, declared in telemetry.SENDS.items():
            name = declared.split()[0]
            line = f'trtllm_pp_progress_{name}{{executor="0",table="{table}"}} '
            (value,) = (float(row.removeprefix(line)) for row in scrape.splitlines() if row.startswith(line))
            assert value == pytest.approx(found[key])


@pytest.mark.parametrize(
    "line",
    [
        'trtllm_pp_progress_vllm_active{rank="0",role="receiver"} 1.0',
        'trtllm_pp_progress_vllm_posts_total{rank="0",reason="flush_idle",role="receiver"} 5.0',
        'trtllm_pp_progress_vllm_posts_by_age_total{age="2",rank="0",role="receiver"} 35.0',
        'trtllm_pp_progress_vllm_forced_posts_total{rank="0",role="receiver"} 1.0',
        'trtllm_pp_progress_vllm_unready_total{rank="0",role="receiver"} 6.0',
        'trtllm_pp_progress_vllm_wait_seconds_total{rank="0",role="receiver"} 0.012',
        'trtllm_pp_progress_vllm_stalled_seconds{rank="0",role="receiver"} 2.5',
        'trtllm_pp_progress_vllm_stalls_total{rank="0",role="receiver"} 1.0',
        'trtllm_pp_progress_vllm_steps_total{rank="3",role="source"} 41.0',
        'trtllm_pp_progress_vllm_broadcasts_total{rank="3",role="source",what="drafts"} 39.0',
        'trtllm_pp_progress_vllm_resident_seconds_total{rank="3",role="source"} 1.5',
        'trtllm_pp_progress_vllm_longest_resident_seconds{rank="3",role="source"} 0.09',
    ],
)
def test_a_worker_is_exported(workers, line):
    """Receivers and the source, with their rank and role, times in seconds."""
    assert line in text().splitlines()


def test_timing_that_is_off_is_not_exported_as_nothing(workers):
    """A time that was not taken is absent, not 0."""
    workers[0] = RECEIVER | {"counters": RECEIVER["counters"] | {"waited": None}}
    assert "wait_seconds" not in text()


def test_names_follow_the_conventions(workers):
    """Lower case, base units, _total on counters and only there, one TYPE line for each name."""
    scrape = text()
    kinds = re.findall(r"^# TYPE (\S+) (\S+)$", scrape, re.M)
    assert len(kinds) == len(dict(kinds)) > 10
    for name, kind in kinds:
        assert re.fullmatch(r"trtllm_pp_progress(_[a-z]+)+", name)
        assert (kind == "counter") == name.endswith("_total")
        assert not re.search(r"_(ms|us|s)(_total)?$", name)


def test_an_idle_process_has_nothing_to_tell(monkeypatch):
    """Neither installed nor a worker: the version alone, and nothing imported to find that out."""
    monkeypatch.delitem(sys.modules, "trtllm_pp_progress.vllm", raising=False)
    version = trtllm_pp_progress.__version__
    samples = [line for line in text().splitlines() if not line.startswith("#")]
    assert samples == [f'trtllm_pp_progress_info{{version="{version}"}} 1.0']
    assert "trtllm_pp_progress.vllm" not in sys.modules


def test_twice_in_one_registry_is_an_error_and_can_be_undone(workers):
    """Two collectors would tell everything twice; prometheus_client says so."""
    registry = CollectorRegistry()
    collector = telemetry.register(registry)
    with pytest.raises(ValueError, match="Duplicated"):
        telemetry.register(registry)
    registry.unregister(collector)
    telemetry.register(registry)


def test_without_the_library_the_error_says_what_to_install(monkeypatch):
    """The core does not depend on it."""
    original = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("prometheus_client"):
            raise ModuleNotFoundError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"trtllm-pp-progress\[telemetry\]"):
        telemetry.register()


def test_importing_it_imports_no_prometheus():
    """Nothing at import: registering is what needs the library."""
    script = "import sys, trtllm_pp_progress.telemetry; print('prometheus_client' in sys.modules)"
    root = Path(telemetry.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"

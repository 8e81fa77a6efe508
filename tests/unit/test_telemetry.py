"""Prometheus metrics: names as Prometheus wants them, every counter there, and nothing of it at import."""

import builtins
import gc
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import LIMIT_S, SLOTS, FakeRequest, executor_class, join
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

import trtllm_pp_progress
from trtllm_pp_progress import telemetry

RECEIVER = {
    "rank": 0, "role": "receiver", "active": True, "steps": 41, "stalls": 1, "stalled_s": 2.5,
    "counters": {
        "posts": 40, "catch_ups": 3, "fallbacks": 1, "flushes": 2, "posts_by_reason": {"due": 35, "flush_idle": 5},
        "age_at_post": {2: 35, 3: 5}, "collectives": 80, "skipped": 4, "consumed": 38, "unready_at_consume": 6,
        "waited": {"count": 6, "total_ms": 12.0, "longest_ms": 7.0, "dropped": 0},
    },
}  # fmt: skip
SOURCE = {
    "rank": 3, "role": "source", "active": True, "steps": 41, "stalls": 0, "stalled_s": 0.0,
    "counters": {
        "broadcasts": 40, "draft_broadcasts": 39, "collectives": 80,
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


def values(scrape, name, **labels):
    """Return the values of a metric in a scrape, of the samples that have these labels, by executor."""
    found = {}
    for row in scrape.splitlines():
        if match := re.fullmatch(rf"{name}{{(.*)}} (\S+)", row):
            has = dict(re.findall(r'(\w+)="([^"]*)"', match[1]))
            if labels.items() <= has.items():
                found[has["executor"]] = float(match[2])
    return found


def test_a_ring_is_exported_as_it_is_counted(monkeypatch):
    """What a patched executor's status says is what a scrape says, table by table, with rank and era."""
    monkeypatch.delitem(sys.modules, "trtllm_pp_progress.vllm", raising=False)
    cls = executor_class("E2")
    with trtllm_pp_progress.install(cls):
        executor = cls()
        executor.start_worker()
        for batch in range(3):
            executor.executed_batch_queue.put(batch % SLOTS)
        for _ in range(3):
            executor.executed_batch_response_queue.get(timeout=LIMIT_S)
        executor.executed_batch_queue.put(None)
        join(executor.handler)
        (described,) = trtllm_pp_progress.status()["installed"][0]["executors"]
        scrape = text()
    number, tables = str(described["number"]), described["tables"]
    assert any(found["posts"] for found in tables.values())
    for table, found in tables.items():
        assert set(found) - {"pending", "parked_histogram"} == set(telemetry.SENDS)  # every one that status() has
        for key, declared in telemetry.SENDS.items():
            name = f"trtllm_pp_progress_{declared.split()[0]}"
            assert values(scrape, name, table=table, rank="3", era="E2") == {number: pytest.approx(found[key])}
    driver = described["driver"]
    assert {key for key, value in driver.items() if isinstance(value, int | float)} == set(telemetry.DRIVER)
    for key, declared in telemetry.DRIVER.items():
        name = f"trtllm_pp_progress_{declared.split()[0]}"
        assert values(scrape, name, rank="3", era="E2") == {number: pytest.approx(driver[key])}


def test_an_executors_label_is_its_own_for_good(monkeypatch):
    """A number that is never given twice: nobody's counters go on under another's name, whoever is collected."""
    monkeypatch.delitem(sys.modules, "trtllm_pp_progress.vllm", raising=False)

    def posts():
        return values(text(), "trtllm_pp_progress_posts_total", table="send_handles")

    cls = executor_class("E2")
    with trtllm_pp_progress.install(cls):
        first, second = cls(), cls()
        for _ in range(2):
            second.send_handles[0] = FakeRequest(0)
            second.wait_on_pp_send_handles(second.send_handles, 0)
        (of_first, none), (of_second, two) = sorted(posts().items(), key=lambda sample: int(sample[0]))
        assert (none, two) == (0.0, 2.0)
        del first
        gc.collect()
        assert posts() == {of_second: 2.0}
        third = cls()
        third.send_handles[0] = FakeRequest(0)
        now = posts()
        assert now.pop(of_second) == 2.0
        ((of_third, one),) = now.items()
        assert one == 1.0
        assert int(of_third) > int(of_second) > int(of_first)


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
        'trtllm_pp_progress_vllm_collectives_total{rank="0",role="receiver"} 80.0',
        'trtllm_pp_progress_vllm_collectives_total{rank="3",role="source"} 80.0',
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
    with pytest.raises(ImportError, match=r"pip install prometheus-client$"):
        telemetry.register()


@pytest.mark.parametrize("variable", ["PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"])
@pytest.mark.parametrize("named", [False, True], ids=["by default", "by name"])
def test_case_85_with_a_multiprocess_registry_the_default_one_is_warned_of(
    named, variable, monkeypatch, tmp_path, caplog
):
    """LMCache/LMCache#621: what is scraped then is a registry with a MultiProcessCollector, which knows files alone.

    prometheus-client 0.9 knows the variable in small letters only.
    """
    monkeypatch.setenv(variable, str(tmp_path))
    collector = telemetry.register(REGISTRY if named else None)
    try:
        assert "trtllm-pp-progress export" in caplog.text
        assert "trtllm_pp_progress" not in generate_latest(multiprocess_registry(str(tmp_path))).decode()
    finally:
        REGISTRY.unregister(collector)


def test_case_85_the_registry_that_is_scraped_has_them(workers, monkeypatch, tmp_path, caplog):
    """Named, it exports them beside what the files say, and nothing is warned of; docs/watch.md says how."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    registry = multiprocess_registry(str(tmp_path))
    telemetry.register(registry)
    assert 'trtllm_pp_progress_vllm_steps_total{rank="3",role="source"} 41.0' in generate_latest(registry).decode()
    assert caplog.text == ""
    assert "the one that your MultiProcessCollector is in" in (DASHBOARD.parent / "watch.md").read_text()


def multiprocess_registry(path):
    """Return what prometheus_client's manual has a process scrape that is one of several."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path)
    return registry


def test_importing_it_imports_no_prometheus():
    """Nothing at import: registering is what needs the library."""
    script = "import sys, trtllm_pp_progress.telemetry; print('prometheus_client' in sys.modules)"
    root = Path(telemetry.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"


DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


def asked():
    """Return every query of the dashboard, those of its variables included."""
    board = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return queries + [one["query"]["query"] for one in board["templating"]["list"] if one["type"] == "query"]


def exported():
    """Return the labels of everything that can be exported, by name."""
    table = dict.fromkeys(telemetry.SENDS, 0) | {"pending": []}
    executor = {"number": 0, "rank": 0, "tables": {"send_handles": table}, "driver": dict.fromkeys(telemetry.DRIVER, 0)}
    sends = {"installed": [{"era": "E2", "executors": [executor]}]}
    registry = CollectorRegistry()
    process = telemetry.ProcessStatus({"pid": "7"}, sends, {"workers": [RECEIVER, SOURCE]})
    registry.register(telemetry.StatusCollector(lambda: [process]))
    found = {}
    for sample in (sample for family in registry.collect() for sample in family.samples):
        found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_the_dashboard_asks_for_what_is_exported():
    """Every name, and every label beside the scrape's own `instance`; a counter by its rate, for it only grows."""
    found, used = exported(), set()
    for query in asked():
        names = re.findall(r"trtllm_pp_progress_\w+", query)
        used.update(names)
        assert names
        assert set(names) <= found.keys()
        grouped = "".join(re.findall(r"by \((.*?)\)", query))
        labels = set(re.findall(r'(\w+)=~?"', query)) | set(re.findall(r"\w+", grouped))
        assert labels - {"instance"} <= set.union(*(found[name] for name in names)), query
        if not query.startswith("label_values"):
            counters = [name for name in names if name.endswith("_total")]
            assert len(counters) == len(re.findall(r"(?:rate|increase)\(trtllm_pp_progress_\w+_total{", query))
    assert len(used) > 10

"""Every counter as a Prometheus metric, read when somebody scrapes: `pip install prometheus-client`.

    from trtllm_pp_progress import telemetry
    telemetry.register()                       # into prometheus_client's default registry
    prometheus_client.start_http_server(9400)  # or whatever the process serves its metrics with

In the process whose counters they are: a rank of TensorRT-LLM, or a worker of vLLM. Nothing is counted twice and
nothing runs between scrapes; what is read is status(). Importing this module imports no Prometheus. Of parked times
there are the sum and the longest; their histogram is left to `watch`, which tells quantiles of a window from it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from trtllm_pp_progress.installation.install import status
from trtllm_pp_progress.settings.version import __version__

__all__ = ["ProcessStatus", "StatusCollector", "own", "register"]

logger = logging.getLogger("trtllm_pp_progress")

PREFIX = "trtllm_pp_progress_"
VLLM = PREFIX + "vllm_"
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"  # in small letters in prometheus-client 0.9

Sample = tuple[str, str, str, dict[str, str], float]  # name, kind, help, labels, value

# A counter of a table of sends: the name of the metric, and what it counts.
SENDS = {
    "posts": "posts_total Sends posted",
    "completions": "completions_total Sends seen complete",
    "at_once": "completions_at_once_total Of these, sends that were complete at their first test",
    "drives": "drives_total Bounded bursts of tests",
    "polls": "polls_total Tests of a pending send",
    "exhausted": "exhausted_drives_total Drives that ended, out of budget or time, with a send still pending",
    "busy": "busy_drives_total Drives that found another thread at work and left",
    "stalls": "stall_warnings_total Warnings about a send that is pending for long",
    "abandoned": "abandoned_sends_total Sends given up at a deadline",
    "displaced": "displaced_sends_total Pending sends whose slot was overwritten",
    "failed": "failed_sends_total Handles that raised",
    "unknown": "unknown_handles_total Handles left to upstream's own wait",
    "parked_s": "parked_seconds_total Time of sends from posted to seen complete",
    "parked_max_s": "longest_parked_seconds The longest of these times",
}
# The same, of an executor's driver.
DRIVER = {
    "ticks": "native_calls_total Calls of the native driver into MPI",
    "silences": "silences_total Times that nobody drove although a send was pending, without a native driver",
    "longest_silence_s": "longest_silence_seconds The longest of these times",
}
RECEIVES = {
    "fallbacks": "forced_posts_total Receives posted by the very step that consumes them",
    "skipped": "skipped_steps_total Steps whose sampled result nobody needed",
    "consumed": "consumed_total Results consumed",
    "unready_at_consume": "unready_total Results that had not come when they were consumed",
    "collectives": "collectives_total Single broadcasts posted, or sent by the source",
}
BROADCASTS = {"broadcasts": "tokens", "draft_broadcasts": "drafts"}


class ProcessStatus(NamedTuple):
    """What one process has to say: labels that tell it apart, and the status of both patches."""

    labels: dict[str, str]
    sends: dict[str, Any]
    receives: dict[str, Any]


def own() -> Iterator[ProcessStatus]:
    """Yield what this process has to say."""
    yield ProcessStatus({}, status(), _vllm_status())


class StatusCollector:
    """Reads status() of both patches when prometheus_client asks for metrics; `processes` yields what each says."""

    def __init__(self, processes: Callable[[], Iterable[ProcessStatus]] = own) -> None:
        self._processes = processes

    def describe(self) -> Iterator[Any]:
        """Yield the one family that is always there: by it a registry knows that it has a collector already."""
        from prometheus_client.core import InfoMetricFamily

        yield InfoMetricFamily(PREFIX[:-1], "What is exported.", {"version": __version__})

    def collect(self) -> Iterator[Any]:
        """Yield one metric family for each name, with a sample for each rank, executor, table or reason."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        for process in self._processes():
            for name, kind, text, own_labels, value in [*_sends(process.sends), *_receives(process.receives)]:
                labels = process.labels | own_labels
                if name not in families:
                    family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
                    families[name] = family(name, text, labels=list(labels))
                families[name].add_metric(list(labels.values()), value)
        yield from self.describe()
        yield from families.values()


def register(registry: Any = None) -> StatusCollector:
    """Add a collector to a registry, prometheus_client's default one if none is given, and return it.

    Raises ImportError without prometheus_client, and ValueError where the registry has these metrics already;
    `registry.unregister(collector)` takes them away again. Warns where PROMETHEUS_MULTIPROC_DIR keeps the default
    registry from being scraped.
    """
    try:
        from prometheus_client import REGISTRY
    except ImportError as error:
        raise ImportError("no prometheus_client: pip install prometheus-client") from error
    registry = REGISTRY if registry is None else registry
    if registry is REGISTRY and any(os.environ.get(name) for name in (MULTIPROCESS, MULTIPROCESS.lower())):
        text = f"{MULTIPROCESS} is set: what is scraped then is not the default registry, nor these metrics"
        logger.warning("%s; name the registry that is, or let `trtllm-pp-progress export` serve them", text)
    collector = StatusCollector()
    registry.register(collector)
    return collector


def _vllm_status() -> dict[str, Any]:
    """Return the receive policy's status; asking imports nothing, for a process without workers has none to tell."""
    module = sys.modules.get("trtllm_pp_progress.vllm")
    return module.status() if module else {"workers": []}


def _named(prefix: str, declared: str, labels: dict[str, str], value: float) -> Sample:
    name, _, text = declared.partition(" ")
    return prefix + name, "counter" if name.endswith("_total") else "gauge", text + ".", labels, value


def _sends(status: dict[str, Any]) -> Iterator[Sample]:
    engines = [(target, engine) for target in status.get("installed", []) for engine in target["executors"]]
    for target, engine in engines:
        rank = "" if engine["rank"] is None else str(engine["rank"])
        of_executor = {"executor": str(engine["number"]), "rank": rank, "era": target["era"]}
        for key, declared in DRIVER.items():
            yield _named(PREFIX, declared, of_executor, engine["driver"][key])
        for table, found in engine["tables"].items():
            labels = of_executor | {"table": table}
            for key, declared in SENDS.items():
                yield _named(PREFIX, declared, labels, found[key])
            ages = [send["age_s"] for send in found["pending"]]
            yield _named(PREFIX, "pending_sends Sends posted and not known to be complete", labels, len(ages))
            oldest = "oldest_pending_seconds Age of the oldest pending send"
            yield _named(PREFIX, oldest, labels, max(ages, default=0.0))


def _receives(status: dict[str, Any]) -> Iterator[Sample]:
    for worker in status.get("workers", []):
        labels = {"rank": str(worker["rank"]), "role": worker["role"]}
        counters = worker["counters"]
        yield _named(VLLM, "active Whether the receive policy is at work", labels, float(worker["active"]))
        yield _named(VLLM, "steps_total Engine steps begun", labels, worker["steps"])
        yield _named(VLLM, "stalls_total Broadcasts that stood still for long", labels, worker["stalls"])
        yield _named(VLLM, "stalled_seconds How long one has stood still now", labels, worker["stalled_s"])
        for key, declared in RECEIVES.items():
            if key in counters:
                yield _named(VLLM, declared, labels, counters[key])
        for reason, count in counters.get("posts_by_reason", {}).items():
            yield _named(VLLM, "posts_total Receives posted, by why then", labels | {"reason": reason}, count)
        for age, count in counters.get("age_at_post", {}).items():
            yield _named(VLLM, "posts_by_age_total Receives posted, by age in steps", labels | {"age": str(age)}, count)
        for key, what in BROADCASTS.items():
            if key in counters:
                yield _named(VLLM, "broadcasts_total Broadcasts issued", labels | {"what": what}, counters[key])
        if spans := counters.get("waited"):
            yield _named(VLLM, "waits_total Waits of the model for a late result", labels, spans["count"])
            yield _named(VLLM, "wait_seconds_total Time of these waits", labels, spans["total_ms"] / 1e3)
            yield _named(VLLM, "longest_wait_seconds The longest of them", labels, spans["longest_ms"] / 1e3)
        if spans := counters.get("residency"):
            yield _named(VLLM, "timed_broadcasts_total Broadcasts timed at the source", labels, spans["count"])
            yield _named(VLLM, "resident_seconds_total Time from ready to sent", labels, spans["total_ms"] / 1e3)
            yield _named(VLLM, "longest_resident_seconds The longest of these", labels, spans["longest_ms"] / 1e3)

"""Ask every door of this host, and tell from two readings what happened in between."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from trtllm_pp_progress.door.client import ask
from trtllm_pp_progress.door.place import DoorError, doors
from trtllm_pp_progress.progress.histogram import quantile, since

__all__ = ["Reading", "Window", "answers", "compare", "read"]


@dataclass(frozen=True)
class Reading:
    """What the processes of one host said, and when (seconds, monotonic): by pid, and the doors that did not answer."""

    host: str
    at: float
    said: dict[int, dict[str, Any]]
    problems: list[str]


@dataclass
class Window:
    """What one executor did over a window; times in milliseconds, rates a second."""

    host: str
    pid: int
    rank: int | None
    executor: int
    era: str
    mode: str
    off: bool
    may_be_off: bool  # else a drain before a forward relies on sends being driven
    sends_per_s: float
    parked_ms_p50: float
    parked_ms_p99: float
    parked_ms_max: float
    pending: int
    oldest_s: float
    drives_per_s: float
    native_per_s: float
    stalls: int
    abandoned: int
    driver: str

    def plain(self) -> dict[str, Any]:
        """Return it in plain values, rounded."""
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()}


def answers(pids: Sequence[int] = (), **request: Any) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """Ask the doors of these processes, or of all, at once; return what they said, and which did not answer.

    Raises DoorError for a pid that has no door.
    """
    found = doors()
    if missing := [pid for pid in pids if pid not in found]:
        known = ", ".join(map(str, found)) or "none"
        raise DoorError(f"process {missing[0]} has no door: those that have one are {known}")
    chosen = {pid: path for pid, path in found.items() if not pids or pid in pids}

    def one(pid: int) -> tuple[int, dict[str, Any] | str]:
        try:
            return pid, ask(chosen[pid], **request)
        except DoorError as error:
            return pid, str(error)

    with ThreadPoolExecutor(max(1, len(chosen))) as pool:
        said = dict(pool.map(one, chosen))
    problems = [text for text in said.values() if isinstance(text, str)]
    return {pid: answer for pid, answer in said.items() if not isinstance(answer, str)}, problems


def read(pids: Sequence[int] = ()) -> Reading:
    """Read the status of every process, or of these."""
    said, problems = answers(pids)
    return Reading(socket.gethostname(), time.monotonic(), said, problems)


def compare(before: Reading | None, now: Reading) -> list[Window]:
    """Return each executor's part over the window between two readings, by rank; without a first, since its start."""
    windows = []
    for pid, said in now.said.items():
        earlier = {} if before is None else dict(_executors(before.said.get(pid, {})))
        seconds = now.at - before.at if before is not None and pid in before.said else 0.0
        for number, (era, status) in _executors(said):
            was = earlier.get(number, (era, None))[1]
            windows.append(_window(now.host, pid, era, status, was, seconds))
    return sorted(windows, key=lambda one: (one.rank is None, one.rank, one.host, one.pid, one.executor))


def _executors(said: dict[str, Any]) -> Iterator[tuple[int, tuple[str, dict[str, Any]]]]:
    for target in said.get("tensorrt_llm", {}).get("installed", []):
        for status in target["executors"]:
            yield status["number"], (status["verdict"]["era"], status)


def _window(host: str, pid: int, era: str, now: dict[str, Any], was: dict[str, Any] | None, seconds: float) -> Window:
    def counted(name: str) -> int:
        def total(status: dict[str, Any]) -> int:
            return sum(int(table[name]) for table in status["tables"].values())

        return total(now) - (total(was) if was else 0)

    def rate(count: float) -> float:
        return count / seconds if seconds else 0.0

    parked: dict[int, int] = {}
    for name, table in now["tables"].items():
        earlier = was["tables"].get(name, {}) if was else {}
        for bucket, count in since(_buckets(table), _buckets(earlier)).items():
            parked[bucket] = parked.get(bucket, 0) + count
    ages = [send["age_s"] for table in now["tables"].values() for send in table["pending"]]
    driver = now["driver"]
    return Window(
        host=host,
        pid=pid,
        rank=now["rank"],
        executor=now["number"],
        era=era,
        mode=driver["runs"],
        off=now["off"],
        may_be_off=now["verdict"]["action"] == "patch",
        sends_per_s=rate(counted("posts")),
        parked_ms_p50=quantile(parked, 0.5) * 1e3,
        parked_ms_p99=quantile(parked, 0.99) * 1e3,
        parked_ms_max=quantile(parked, 1.0) * 1e3,
        pending=len(ages),
        oldest_s=max(ages, default=0.0),
        drives_per_s=rate(counted("drives")),
        native_per_s=rate(driver["ticks"] - (was["driver"]["ticks"] if was else 0)),
        stalls=counted("stalls"),
        abandoned=len(now["abandoned"]),
        driver=driver["state"],
    )


def _buckets(table: dict[str, Any]) -> dict[int, int]:
    return {int(bucket): count for bucket, count in table.get("parked_histogram", {}).items()}

"""`ab`: what driving is worth on live traffic: off and on in turns, and what each period saw."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import click
from rich.console import Console
from rich.table import Table

from trtllm_pp_progress.door.place import doors
from trtllm_pp_progress.tools.watch.readings import Reading, answers, compare, read

__all__ = ["Phase", "ab"]

LEASE_MARGIN_S = 2.0  # a process that hears no more from us turns driving on again so long after the period
SETTLE_S = 0.25  # of each period's start, which still shows the one before


@dataclass
class Phase:
    """What the periods of one kind saw: one value a period.

    No parked times while driving is off: a send that nobody tests may be complete for long, and a test would drive it.
    """

    sends_per_s: list[float] = field(default_factory=list)  # of the slowest rank
    parked_ms_p50: list[float] = field(default_factory=list)  # of the worst rank
    parked_ms_p99: list[float] = field(default_factory=list)

    def take(self, before: Reading, now: Reading) -> None:
        """Note one period."""
        windows = [window for window in compare(before, now) if window.sends_per_s]
        if windows:
            self.sends_per_s.append(min(window.sends_per_s for window in windows))
        if windows and not any(window.off for window in windows):
            self.parked_ms_p50.append(max(window.parked_ms_p50 for window in windows))
            self.parked_ms_p99.append(max(window.parked_ms_p99 for window in windows))


def ab(pids: Sequence[int], seconds: float, period: float, say: Callable[[str], object]) -> dict[str, Phase]:
    """Turn driving off and on for `period` seconds each, for `seconds` in all, and return what each kind saw.

    Ends with driving on, whatever happens: by the order, or by the end of the lease that each off has. Raises
    click.ClickException where there is nobody, or where off is not safe for an executor; nothing is turned off then.
    """
    first = read(pids)
    if not first.said:
        raise click.ClickException("no patched process of this user on this host")
    if relying := [window for window in compare(None, first) if not window.may_be_off]:
        window = relying[0]
        text = f"rank {window.rank}, process {window.pid}, era {window.era}: a drain relies on sends being driven"
        raise click.ClickException(f"driving cannot be turned off here: {text}")
    say(f"driving goes off and on in turns, {period:g} s each, for {seconds:g} s, in {len(first.said)} processes")
    phases = {"off": Phase(), "on": Phase()}
    ends = time.monotonic() + seconds
    try:
        while time.monotonic() < ends:
            for order, phase in phases.items():
                _order(pids, order, period + LEASE_MARGIN_S)
                time.sleep(min(SETTLE_S, period / 4))
                before = read(pids)
                time.sleep(period)
                phase.take(before, read(pids))
    finally:
        _turn_on(pids)
    return phases


def _turn_on(pids: Sequence[int]) -> None:
    """Turn driving on wherever it may be off: some of the processes may be gone by now."""
    left = [pid for pid in pids if pid in doors()]
    if left or not pids:
        answers(left, order="on")


def print_phases(phases: dict[str, Phase], console: Console) -> None:
    """Print the medians of both kinds with their spread, and what driving is worth."""
    table = Table(title="driving off and on, medians (least to most) of the periods", title_justify="left", box=None)
    for title in ("driving", "sends/s", "parked p50 ms", "p99 ms"):
        table.add_column(title, justify="left" if title == "driving" else "right")
    for kind, phase in phases.items():
        sends, *parked = (_spread(values) for values in vars(phase).values())
        table.add_row(kind, sends or "nothing was sent", *(times or "not known" for times in parked))
    console.print(table)
    off, on = phases["off"].sends_per_s, phases["on"].sends_per_s
    if off and on and (worth := statistics.median(on) / max(statistics.median(off), 1e-9)):
        console.print(f"with driving on the ring sends {worth:.2f} times as often")


def _spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _order(pids: Sequence[int], order: str, lease_s: float) -> None:
    said, problems = answers(pids, order=order, lease_s=lease_s)
    refused = [reason for answer in said.values() for reason in answer.get("tensorrt_llm", {}).get("refused", [])]
    if refused or problems:
        raise click.ClickException((refused or problems)[0])

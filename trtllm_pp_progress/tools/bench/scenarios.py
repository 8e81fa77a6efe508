"""Named parameter sets of the bench, and what it compares; needs no MPI."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from trtllm_pp_progress.tools.host import POLICIES

__all__ = ["ALTERNATIVES", "PATCHED", "POLICY_NAMES", "SCENARIOS", "Scenario", "caution", "listing"]

PATCHED = "patched"  # the regressed executor with our patch installed
# What users can set instead of the patch: the regressed relay in an mpirun of its own, with these variables.
ALTERNATIVES = {"eager": {"UCX_RNDV_THRESH": "inf"}, "async": {"MPIR_CVAR_ASYNC_PROGRESS": "1"}}
POLICY_NAMES = (*POLICIES, PATCHED)

SEED = 20003  # of what is random in a scenario: the same for every policy and repetition


@dataclass(frozen=True)
class Scenario:
    """One regime of the model-free ring; times in seconds. docs/measuring.md says what each stands for."""

    name: str
    meaning: str  # one line for people
    compute_s: float = 0.002  # forward time of one stage
    last_stage: float = 1.0  # the last stage's time, in times of the others
    payload_bytes: int = 65536
    schedule_bytes: int = 0  # what an iteration's schedule carries beside its requests
    reentry_s: float = 0.25  # how often an executor that waits re-enters MPI
    late_s: tuple[float, float] = (0.0, 0.0)  # a receiver is busy elsewhere once a sample state was announced: from, to
    hold_s: float = 0.0  # an executor thread holds the GIL this long once its relay has posted, in each step
    everybody_holds: bool = False  # every rank's, not the last one's alone
    busy: bool = False  # main threads exchange small messages
    rendezvous: bool = False  # an activation is sent only once the next rank has received the schedule
    concurrency: int = 1
    steps: int = 100  # tokens timed
    max_seconds: float = 4.0  # a slow policy is timed over fewer tokens, but at least MIN_STEPS

    def compute(self, rank: int, size: int) -> float:
        """Return a rank's stage time in seconds."""
        return self.compute_s * (self.last_stage if rank == size - 1 else 1.0)

    def late(self, rank: int) -> Callable[[], float] | None:
        """Return what gives a receiver's next delay in seconds, from its beginning; None where nobody is late."""
        low, high = self.late_s
        draw = random.Random(SEED + rank)
        return (lambda: draw.uniform(low, high)) if high else None

    def holds(self, rank: int, size: int) -> float:
        """Return for how many seconds this rank's executor thread holds the GIL in each step."""
        return self.hold_s if self.everybody_holds or rank == size - 1 else 0.0


STEADY = Scenario("steady", "2 ms a stage, 64 KiB, an executor that waits re-enters MPI every 250 ms")
LATE = replace(
    STEADY, name="late", meaning="steady, and a receiver is busy elsewhere for 20 ms", late_s=(0.02, 0.02), steps=50
)
LARGE = replace(STEADY, name="large", meaning="steady with 1 MB", payload_bytes=1_000_000)
HELD = replace(
    STEADY,
    name="gil_held",
    meaning="steady, and the last rank's executor holds the GIL for 100 ms in each step",
    hold_s=0.1,
    steps=30,
)
SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "published",
            "0.7 ms a stage, 64 KiB, re-entry every 1 ms: upstream's published pair of figures",
            compute_s=0.0007,
            reentry_s=0.001,
            steps=400,
        ),
        STEADY,
        LATE,
        replace(LATE, name="late_random", meaning="the same for 0 to 50 ms, at random from one seed", late_s=(0, 0.05)),
        LARGE,
        replace(LARGE, name="large_8mb", meaning="steady with 8 MB", payload_bytes=8_000_000),
        replace(LARGE, name="large_32mb", meaning="steady with 32 MB", payload_bytes=32_000_000),
        replace(STEADY, name="many", meaning="steady with 8 requests in flight", concurrency=8, steps=400),
        replace(STEADY, name="uneven", meaning="steady, and the last stage takes twice as long", last_stage=2.0),
        HELD,
        replace(
            HELD,
            name="gil_held_all",
            meaning="the same on every rank, once its relay has sent the sample state on",
            everybody_holds=True,
        ),
        replace(HELD, name="gil_held_500", meaning="gil_held for 500 ms", hold_s=0.5, steps=10),
        replace(
            LATE,
            name="busy",
            meaning="late, while the main threads of neighbours exchange small messages: is their latency hurt?",
            busy=True,
        ),
        replace(
            STEADY,
            name="sync_dependency",
            meaning="an activation goes only once the next rank has received the schedule, 64 KiB itself",
            schedule_bytes=65536,
            rendezvous=True,
            steps=50,
        ),
    )
}


def caution(scenario: Scenario, policies: Iterable[str]) -> str:
    """Return what must not be read from a scenario's figures, in one line, or nothing."""
    if scenario.concurrency > 1 and "inline" in policies:
        return (
            f"{scenario.name}: inline says nothing of upstream here. A forward of this ring blocks the executor thread "
            "which is to relay other requests meanwhile; upstream launches it and goes on, as perf/test_perf.py does."
        )
    return ""


def listing() -> str:
    """Return the scenarios, one a line, for --help."""
    return "\n".join(f"  {name:16}{scenario.meaning}" for name, scenario in SCENARIOS.items())

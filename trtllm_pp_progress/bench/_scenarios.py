"""Named parameter sets of the bench, and the policies it compares."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trtllm_pp_progress.host import POLICIES, HostExecutor

__all__ = ["PATCHED", "POLICY_NAMES", "SCENARIOS", "Scenario", "executor_class"]

PATCHED = "patched"  # the regressed executor with our patch installed
POLICY_NAMES = (*POLICIES, PATCHED)


@dataclass(frozen=True)
class Scenario:
    """One regime of the model-free ring; times in seconds. perf/README.md says what each stands for."""

    name: str
    compute_s: float = 0.002  # forward time of one stage
    payload_bytes: int = 65536
    reentry_s: float = 0.25  # how often an executor that waits re-enters MPI
    late_s: float = 0.0  # how long a receiver is busy elsewhere once a sample state was announced
    concurrency: int = 1
    steps: int = 100  # tokens timed
    max_seconds: float = 4.0  # a slow policy is timed over fewer tokens, but at least MIN_STEPS


STEADY = Scenario("steady")
SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("published", compute_s=0.0007, reentry_s=0.001, steps=400),
        STEADY,
        replace(STEADY, name="late", late_s=0.02, steps=50),
        replace(STEADY, name="large", payload_bytes=1_000_000),
        replace(STEADY, name="many", concurrency=8, steps=400),
    )
}


def executor_class(policy: str) -> type[HostExecutor]:
    """Return the executor class of a policy; that of `patched` is the regressed one, to be installed on."""
    return HostExecutor if policy == PATCHED else POLICIES[policy]

"""The policies of the performance case, by name; `+patch` after a name installs the package on that relay.

| policy | era | who relays |
| --- | --- | --- |
| regressed, flush, oneshot | B/D/E, C, #14850 | the relay thread |
| iprobe | H with TLLM_PP_ASYNC_BROADCAST_SAMPLE_STATE=1 | the relay thread, with a pump while it idles |
| native | I, the same | the same, and a native thread at a fixed interval |
| inline-f | F | the executor thread, which waits for every slot before a forward |
| inline-g | G | the executor thread; the last rank waits for the one slot that is due |
| inline-h | H | as G; the idle relay thread pumps |
| inline-i | I | as H, and a native thread at a fixed interval |

F and G with TLLM_PP_ASYNC_BROADCAST_SAMPLE_STATE=1 relay as `regressed` does; regressed+patch is called `patched`.
"""

from __future__ import annotations

from collections.abc import Iterable

from trtllm_pp_progress.tools.bench.scenarios import PATCHED

__all__ = ["POLICY_NAMES", "RELAY_NAMES", "is_patched", "pairs", "unpatched"]

PATCH = "+patch"
RELAY_NAMES = (  # the keys of case.relays.RELAYS, without importing what those need
    "regressed", "flush", "oneshot", "iprobe", "native", "inline-f", "inline-g", "inline-h", "inline-i",
)  # fmt: skip
# The burst of #14850 is a patch of its own: ours stands down beside it.
PATCHES = {name: PATCHED if name == "regressed" else name + PATCH for name in RELAY_NAMES if name != "oneshot"}
POLICY_NAMES = tuple(policy for name in RELAY_NAMES for policy in (name, PATCHES.get(name)) if policy)


def is_patched(policy: str) -> bool:
    """Whether the package is installed for a policy."""
    return policy in PATCHES.values()


def unpatched(policy: str) -> str:
    """Return the policy without the patch: the other half of a pair."""
    return "regressed" if policy == PATCHED else policy.removesuffix(PATCH)


def pairs(policies: Iterable[str]) -> list[tuple[str, str]]:
    """Return (without, with the patch) for every relay of which both are among the policies."""
    given = set(policies)
    return [(name, patched) for name, patched in PATCHES.items() if {name, patched} <= given]

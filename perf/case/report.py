"""Print a result for people: what was run, a table, where a step's time went, one step before and after."""

from __future__ import annotations

from statistics import median
from typing import Any

import output
from case import judge
from case.figure import middle, text
from verdict import Verdict

__all__ = ["print_result"]


def print_result(written: dict[str, Any], found: Verdict) -> None:
    """Print to stdout."""
    print(output.described(written["environment"]))
    print(f"# {written['case']}")
    print(f"# scaled: {', '.join(written['scaled'])}" if written["scaled"] else "# as the case has it")
    print(
        f"# {written['engine']}, {written['model']}, PP{written['pp']}, link {written['link']}, batches of "
        f"{written['batch']}, {written['payload_bytes']:,} bytes, host work {written['host_work_ms']:g} ms"
        + (" holding the GIL" if written["hold_gil"] else "")
    )
    print(_rates(written["rows"]), _shares(written["rows"]), sep="\n\n")
    shown = {name: middle(written["rows"][name]) for name in ("regressed", "patched") if written["rows"].get(name)}
    if shown:
        print(text("\none step of the ring", shown))
    for line in written["judged"]:
        if line not in (*found.failures, *found.inconclusive):
            print(f"not judged here: {line}")
    print(*found.lines(f"PASSED; {written['compared_tokens']} tokens are those of the unsplit model"), sep="\n")


def _rates(rows: dict[str, list[dict[str, Any]]]) -> str:
    columns = ("policy", "tokens/s", "of flush", "of unpatched", "ms/step", "parked p50", "p99", "max ms", "polls/step")
    good = median(run["tokens_per_s"] for run in rows["flush"]) if rows.get("flush") else None
    cells, ratios = [], judge.in_pairs(rows)
    for policy, runs in rows.items():
        rate = median(run["tokens_per_s"] for run in runs)
        parked = [median(run["parked_ms"][q] for run in runs) for q in ("p50", "p99", "max")]
        cells.append(
            (
                policy,
                f"{rate:.2f}",
                "-" if good is None else f"{rate / good:.3f}",
                "{:.3f} ({:.3f}-{:.3f})".format(*ratios[policy]) if policy in ratios else "-",
                f"{median(run['step_ms_p50'] for run in runs):.3f}",
                *(f"{ms:.3f}" for ms in parked),
                f"{median(run['polls_per_step'] for run in runs):.1f}",
                f"{median(sum(run['cpu_cores']) / len(run['cpu_cores']) for run in runs):.2f}",
                str(sum(run["wrong"] for run in runs)),
            )
        )
    return output.table((*columns, "CPU cores", "wrong"), cells)


def _shares(rows: dict[str, list[dict[str, Any]]]) -> str:
    parts = ("compute", "parked", "wire", "idle")
    columns = ("policy", *parts, "computing ms/step", "busy by rank", "executor in MPI every, ms")
    cells = []
    for policy, runs in rows.items():
        run = middle(runs)
        cells.append(
            (
                policy,
                *(f"{run['shares'][part]:.1%}" for part in parts),
                f"{judge.kernel_ms(run):.3f}",
                "/".join(f"{share:.0%}" for share in run["busy"]),
                "/".join(f"{ms:.2g}" for ms in run["reentry_ms"]),
            )
        )
    return output.table(columns, cells)

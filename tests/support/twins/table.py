"""The table: both twins of a cell, run and compared, and its lines."""

import itertools
from concurrent.futures import ThreadPoolExecutor

from twins.job import run
from twins.verdict import NOISE_S, told, worse

RARE = 30  # runs of the unpatched twin: a race that it loses once in six is then missed once in 240


def twins(cell):
    """Run both twins of a cell at the same time, so that they meet the same machine."""
    with ThreadPoolExecutor(2) as pool:
        return tuple(pool.map(lambda patched: run(cell, patched), (False, True)))


def judge(cell, again=4, noise_s=NOISE_S):
    """Run a cell, and again where it looks worse; return what came of each twin, each time, and what is worse.

    Where it still looks worse then, the unpatched twin gets more runs to show that it does the same now and then:
    an exit with a thread inside MPI is a race (here it ended with a crash in MPI_Probe 4 times of 24).
    """
    unpatched, patched, found = [], [], ["not seen"]
    while found and len(patched) <= again:
        for outcomes, outcome in zip((unpatched, patched), twins(cell), strict=True):
            outcomes.append(outcome)
        found = worse(cell, unpatched, patched, noise_s)
    while found and again and len(unpatched) < RARE:
        unpatched.append(run(cell, False))
        found = worse(cell, unpatched, patched, noise_s)
    return unpatched, patched, found


def report(number, cell, unpatched, patched, found):
    """Return the lines of a cell in the table."""
    lines = [f"{number:3} {cell}"]
    for before, after in itertools.zip_longest(unpatched, patched):
        lines.append(f"    unpatched: {told(before)}")
        if after is not None:
            lines.append(f"    patched:   {told(after)}")
    return "\n".join([*lines, *(f"    WORSE:     {what}" for what in found)])

"""Live through situations twice, without the patch and with it, and print what was worse with it.

python tests/support/twin.py [--all | --random N] [--era E2 F ...] [--receiver late ...]
Exits with 1 if a cell is worse.
"""

import argparse
import random
import sys

from twins.cells import COLUMNS, DEFAULT, SUITE, Cell, cover
from twins.table import judge, report
from twins.verdict import NOISE_S


def options():
    """Return what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every pair of values of two columns, and the default rows")
    parser.add_argument("--random", type=int, metavar="N", help="N random cells")
    parser.add_argument("--seed", type=int, default=0, help="of the random cells")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="every Nth cell, from the Ith on")
    parser.add_argument("--again", type=int, default=4, metavar="N", help="run a cell that looks worse N times more")
    parser.add_argument("--noise", type=float, default=NOISE_S, metavar="S", help="what noise may add to an end")
    parser.add_argument("--show", action="store_true", help="show what the ranks of a worse cell wrote")
    for name, values in COLUMNS.items():
        parser.add_argument(f"--{name}", type=type(values[0]), nargs="+", help=f"only these of {values}")
    return parser.parse_args()


def chosen(asked):
    """Return the cells that were asked for."""
    limits = {name: values for name in COLUMNS if (values := getattr(asked, name))}
    if asked.random:
        dice = random.Random(asked.seed)
        values = {**COLUMNS, **limits}
        cells = [Cell(**{name: dice.choice(values[name]) for name in COLUMNS}) for _ in range(asked.random)]
    else:
        cells = [*cover(2), DEFAULT] if asked.all else [*SUITE, DEFAULT]
        cells = [cell for cell in cells if all(getattr(cell, name) in values for name, values in limits.items())]
    first, every = map(int, asked.part.split("/"))
    return cells[first::every]


def main():
    """Print the table."""
    asked, bad = options(), 0
    cells = chosen(asked)
    for number, cell in enumerate(cells):
        unpatched, patched, found = judge(cell, asked.again, asked.noise)
        bad += bool(found)
        print(report(number, cell, unpatched, patched, found), flush=True)
        if found and asked.show:
            for name, outcomes in (("unpatched", unpatched), ("patched", patched)):
                for rank, left in enumerate(outcomes[0].ranks):
                    print(f"--- {name}, rank {rank}: {left.events}\n{left.output}", flush=True)
    print(f"{len(cells)} cells, {bad} worse")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()

"""The situations: a cell says how the receiver behaves, how all others end, what is pending, who has the GIL."""

import itertools
from dataclasses import asdict, dataclass

RECEIVERS = ("on time", "late", "stopped", "gone", "killed", "raises")
ENDS = (
    "shutdown",
    "shutdown, lives on",  # until the receiver has what it came for
    "at exit, registered first",  # before our import: then our own exit handlers run earlier
    "at exit, registered last",
    "signal",
    "exception",  # with the executor up
    "exception in with",  # whose end shuts it down
    "finalize",  # MPI.Finalize() by hand, with the executor up
    "finalize in shutdown",  # with a thread that shuts down and waits
    "collected",
)
PENDING = {"nothing": None, "1 B": 1, "64 KiB": 1 << 16, "1 MB": 1_000_000}
ERAS = ("B/D", "C", "E1", "E2", "F", "G", "H", "F-async", "G-async", "H-async")
LATE_S = 2.0
SHORT_S, LONG_S = 1.5, 5.0  # drain deadlines, around LATE_S
COLUMNS = {
    "receiver": RECEIVERS,
    "end": ENDS,
    "pending": tuple(PENDING),
    "deadline_s": (SHORT_S, LONG_S),
    "era": ERAS,
    "gil": ("free", "held"),
    "ranks": (2, 3, 4),
}


@dataclass(frozen=True)
class Cell:
    """One situation. `deadline_s` is the patch's; `late_s` is when a receiver that comes at all posts its receive."""

    receiver: str = "late"
    end: str = "shutdown"
    pending: str = "1 MB"
    deadline_s: float = LONG_S
    era: str = "E2"
    gil: str = "free"
    ranks: int = 2
    late_s: float = LATE_S

    def __post_init__(self):
        for name, values in COLUMNS.items():
            if name != "deadline_s" and getattr(self, name) not in values:
                raise ValueError(f"{name}={getattr(self, name)!r} is not valid: one of {', '.join(map(str, values))}")

    @property
    def nbytes(self):
        """How many bytes the withheld sample state has, or None where all are received."""
        return None if self.receiver == "on time" else PENDING[self.pending]

    @property
    def peer_gone(self):
        """Whether nobody will ever receive what is pending."""
        return self.receiver in ("gone", "killed", "raises") and self.nbytes is not None

    @property
    def hangs_unpatched(self):
        """Whether upstream's cleanup is sure to wait for ever: it shuts down while a large send has no receiver."""
        sure = self.end in ("shutdown", "shutdown, lives on", "collected", "signal") and self.pending == "1 MB"
        return sure and self.receiver in ("gone", "raises")

    @property
    def held_s(self):
        """How long no other thread of the sender gets the GIL."""
        return self.late_s + 1.0 if self.gil == "held" else 0.0

    @property
    def limit_s(self):
        """How long an end may take before it counts as a hang."""
        return max(self.late_s, self.deadline_s) + 8.0

    def describe(self):
        """Return it in plain values."""
        return asdict(self)

    def __str__(self):
        return ", ".join(
            f"{getattr(self, name):g} s" if name == "deadline_s" else str(getattr(self, name)) for name in COLUMNS
        )


DEFAULT = Cell(end="shutdown, lives on", deadline_s=10.0, late_s=12.0)  # the default deadline, and later than that

SUITE = (  # every value of every column, and what was once worse
    Cell(receiver="late", end="at exit, registered first", pending="1 MB", deadline_s=SHORT_S, era="E2"),
    Cell(receiver="gone", end="at exit, registered first", pending="64 KiB", deadline_s=SHORT_S, era="H-async"),
    Cell(receiver="killed", end="shutdown", pending="1 MB", deadline_s=SHORT_S, era="G", ranks=3),
    Cell(receiver="stopped", end="at exit, registered last", pending="1 MB", deadline_s=LONG_S, era="E1", gil="held"),
    Cell(receiver="raises", end="signal", pending="1 B", deadline_s=SHORT_S, era="F-async"),
    Cell(receiver="late", end="shutdown, lives on", pending="1 MB", deadline_s=SHORT_S, era="E2"),
    Cell(receiver="late", end="finalize in shutdown", pending="1 MB", deadline_s=LONG_S, era="B/D", gil="held"),
    Cell(receiver="gone", end="collected", pending="1 MB", deadline_s=SHORT_S, era="F"),
    Cell(receiver="late", end="exception in with", pending="64 KiB", deadline_s=SHORT_S, era="C"),
    Cell(receiver="on time", end="exception", pending="64 KiB", deadline_s=LONG_S, era="G-async"),
    Cell(receiver="on time", end="finalize", pending="nothing", deadline_s=LONG_S, era="H", ranks=4),
)


def cover(strength, columns=COLUMNS):
    """Return few cells in which every combination of the values of `strength` columns occurs."""
    names = list(columns)
    missing = {
        tuple(zip(chosen, values, strict=True))
        for chosen in itertools.combinations(names, strength)
        for values in itertools.product(*(columns[name] for name in chosen))
    }
    cells = []
    while missing:
        row = dict(min(missing, key=str))
        for name in [name for name in names if name not in row]:
            rows = [{**row, name: value} for value in columns[name]]
            row = max(rows, key=lambda row: _gain(missing, row, strength, cells))
        missing -= {tuple((name, row[name]) for name in chosen) for chosen in itertools.combinations(names, strength)}
        cells.append(Cell(**row))
    return cells


def _gain(missing, row, strength, cells):
    """Return how many missing combinations a partial row has; among equals the value that was used least."""
    *_, last = row
    chosen = itertools.combinations([name for name in COLUMNS if name in row], strength)
    new = sum(tuple((name, row[name]) for name in names) in missing for names in chosen)
    return new, -sum(getattr(cell, last) == row[last] for cell in cells)

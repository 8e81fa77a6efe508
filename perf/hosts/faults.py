"""The fault matrix: what becomes of the ring when something happens between or to its hosts, patched and as it is.

    python perf faults                                       # two hosts, four stages: about 20 minutes
    python perf faults --hosts 4 --pp 8 --relays E --json faults.json
    python perf faults --faults cut-5,killed --relays C

The hosts are made by ci/hosts.sh, each cell on hosts of its own; the MPI is the one beside this Python. Exits with 1 if
a payload was wrong, or if the patch did not end where the relay without it did; with 77 where no hosts can be made.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from output import described, table, write
from trtllm_pp_progress.tools.job.launch import TRANSPORTS, find_launcher, made_by
from trtllm_pp_progress.tools.job.options import JSON_FILE, Finite, Names, run_command

HERE = Path(__file__).parent
BED = HERE.parents[1] / "ci" / "hosts.sh"
CANNOT = 77  # what ci/hosts.sh exits with where this machine lacks something
RELAYS = ("E", "C")  # eras: left alone (the regression), and flushed
PATCHED = ", patched"  # ends the name of a column
PAYLOAD, TOKENS = 1_000_000, 20


@dataclass(frozen=True)
class Fault:
    """One row: what the network adds, or what happens at a moment, and how long that lasts (None: for good)."""

    meaning: str
    bed: tuple[str, ...] = ()
    act: str = "none"
    seconds: float | None = None
    moment: str = "half"
    late_s: float = 0.0


HAPPENINGS = {
    "cut-1": Fault("link of host 2 down for 1 s", act="cut", seconds=1),
    "cut-5": Fault("link of host 2 down for 5 s", act="cut", seconds=5),
    "cut": Fault("link of host 2 down for good", act="cut"),
    "stopped": Fault("a rank stopped for 5 s", act="stop", seconds=5),
    "killed": Fault("a rank killed", act="kill"),
    "daemon": Fault("its launcher's daemon killed", act="kill daemon"),
}
FAULTS = {
    "none": Fault("nothing"),
    "loss-1": Fault("1 % of packets lost", ("--loss", "1")),
    "loss-5": Fault("5 % of packets lost", ("--loss", "5")),
    "delay-5": Fault("5 ms more one way", ("--delay", "5")),
    "delay-50": Fault("50 ms more one way", ("--delay", "50")),
    "slow": Fault("100 Mbit/s", ("--rate", "100")),
    "late": Fault("a receiver 2 s late, twice", late_s=2.0),
    **HAPPENINGS,
    **{
        f"{name}-end": Fault(f"{one.meaning}, from the shutdown on", act=one.act, seconds=one.seconds, moment="all")
        for name, one in HAPPENINGS.items()
    },
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--hosts", default=2, show_default=True, type=click.IntRange(2, 16), help="Hosts of the bed.")
@click.option("--pp", default=4, show_default=True, type=click.IntRange(2, 64), help="Pipeline stages, one rank each.")
@click.option("--faults", default=",".join(FAULTS), show_default=True, type=Names("fault", tuple(FAULTS)))
@click.option("--relays", default=",".join(RELAYS), show_default=True, type=Names("relay", RELAYS), help="Eras.")
@click.option("--transport", default="default", show_default=True, type=Names("transport", tuple(TRANSPORTS)))
@click.option("--deadline", default=45.0, show_default=True, type=Finite(1), help="Seconds that a ring may take.")
@click.option("--json", "json_file", type=JSON_FILE, help="Write what became of each cell here.")
def command(
    hosts: int,
    pp: int,
    faults: list[str],
    relays: list[str],
    transport: list[str],
    deadline: float,
    json_file: Path | None,
) -> None:
    """Run the matrix and print it."""
    cells: dict[str, dict[str, Any]] = {}
    for fault in faults:
        for relay in relays:
            for patched in (False, True):
                name = _column(relay, patched)
                cells.setdefault(fault, {})[name] = _cell(
                    hosts, pp, FAULTS[fault], relay, patched, transport[0], deadline
                )
                click.echo(f"{fault}, {name}: {_short(cells[fault][name])}", err=True)
    version = find_launcher()[1]
    environment = {
        "hosts": hosts,
        "pp": pp,
        "mpi": f"{made_by(version)} {re.findall(r'[0-9]+[.][0-9.]+', version)[0]}",
        "transport": transport[0],
        "bytes": PAYLOAD,
        "tokens": TOKENS,
    }
    click.echo(described(environment))
    click.echo(_table(cells))
    if json_file is not None:
        write(json_file, environment=environment, cells=cells)
    worse = judge(cells)
    for line in worse:
        click.echo(f"FAILED: {line}")
    raise SystemExit(1 if worse else 0)


def _cell(
    hosts: int, pp: int, fault: Fault, relay: str, patched: bool, transport: str, deadline_s: float
) -> dict[str, Any]:
    """Run one cell on hosts of its own."""
    ring = {
        "relay": relay,
        "patched": patched,
        "pp": pp,
        "payload": PAYLOAD,
        "tokens": TOKENS,
        "late_s": fault.late_s,
    }
    what = {
        "fault": [fault.act, fault.seconds],
        "moment": fault.moment,
        "deadline_s": deadline_s,
        "transport": transport,
        "ring": ring,
    }
    with tempfile.TemporaryDirectory() as folder:
        bed = ["bash", str(BED), str(hosts), "--slots", str(-(-pp // hosts)), *fault.bed, "--"]
        line = [*bed, sys.executable, str(HERE / "cell.py"), folder, json.dumps(what)]
        done = subprocess.run(
            line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=deadline_s + 60, check=False
        )
    if done.returncode == CANNOT:
        raise SystemExit(CANNOT)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def judge(cells: dict[str, dict[str, Any]]) -> list[str]:
    """Return what must not be: wrong payloads, and cells in which the patch did not end as the relay without it did."""
    worse = []
    for fault, row in cells.items():
        for name, cell in row.items():
            if cell["wrong"]:
                worse.append(f"{fault}, {name}: {cell['wrong']} wrong payloads")
            plain = row.get(name.removesuffix(PATCHED))
            if name.endswith(PATCHED) and plain and _grade(cell) > _grade(plain):
                worse.append(f"{fault}, {name}: {cell['outcome']}, without the patch {plain['outcome']}")
    return worse


def _grade(cell: dict[str, Any]) -> int:
    return ("ended", "aborted", "hung").index(cell["outcome"])


def _column(relay: str, patched: bool) -> str:
    return relay + (PATCHED if patched else "")


def _short(cell: dict[str, Any]) -> str:
    """Return a cell of the table: how the ring ended, and when; wrong payloads, if any."""
    how = {"ended": "ended", "aborted": "ended by MPI", "hung": "hung"}[cell["outcome"]]
    when = "" if cell["outcome"] == "hung" else f", {cell['seconds']:.0f} s"
    return how + when + (f", {cell['wrong']} WRONG" if cell["wrong"] else "")


def _table(cells: dict[str, dict[str, Any]]) -> str:
    """Return a line a fault: how each relay ended, and what the patch said on the way."""
    columns = list(next(iter(cells.values())))
    rows = []
    for fault, row in cells.items():
        said = [
            f"{name.removesuffix(PATCHED)} {kind} {times}x"
            for name, cell in row.items()
            if name.endswith(PATCHED)
            for kind, times in sorted(cell["said"].items())
        ]
        rows.append([FAULTS[fault].meaning, *map(_short, row.values()), ", ".join(said)])
    return table(["fault", *columns, "the patch says"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `python perf faults`."""
    run_command(command, arguments)


if __name__ == "__main__":
    main()

"""Make the pictures of a result of perf/test_perf.py, on any machine: timelines as text, PNG, and a Perfetto trace.

python perf pictures result.json                                 # text
python perf pictures result.json --png ring.png --trace ring.trace.json.gz
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from case.figure import draw, middle, text
from case.perfetto import trace
from trtllm_pp_progress.tools.job.options import run_command

__all__ = ["command", "main"]

BEFORE_AND_AFTER = "regressed,patched"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("result", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--policies", default=BEFORE_AND_AFTER, show_default=True, help="Which to show, in this order.")
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Write a picture; needs matplotlib.")
@click.option(
    "--trace", "trace_file", type=click.Path(dir_okay=False, path_type=Path), help="Write a trace (.gz packs)."
)
def command(result: Path, policies: str, png: Path | None, trace_file: Path | None) -> None:
    """Show one step of the ring from RESULT, a JSON file of perf/test_perf.py."""
    written = json.loads(result.read_text(encoding="utf-8"))
    if "rows" not in written or "case" not in written:
        raise click.ClickException(f"{result} is no result of perf/test_perf.py")
    runs = chosen(written, policies.split(","))
    click.echo(text(title(written), runs))
    if png is not None:
        draw(title(written), runs, png)
    if trace_file is not None:
        write_trace(written, trace_file)


def chosen(written: dict[str, Any], policies: list[str]) -> dict[str, Any]:
    """Return of each policy the run of middle speed; ClickException for one that is not there."""
    runs = {}
    for policy in policies:
        if policy not in written["rows"]:
            raise click.ClickException(f"no policy {policy!r} in this result: it has {', '.join(written['rows'])}")
        runs[policy] = middle(written["rows"][policy])
    return runs


def title(written: dict[str, Any]) -> str:
    """Return one line that says what was run."""
    scale = f" ({', '.join(written['scaled'])})" if written["scaled"] else ""
    host = f", {written['host_work_ms']:g} ms of host work" if written["host_work_ms"] else ""
    what = [written["model"], f"PP{written['pp']}", *(written[name] for name in ("engine", "link", "transport"))]
    return ", ".join(what) + host + scale


def write_trace(written: dict[str, Any], path: Path) -> None:
    """Write the kept steps of every policy."""
    data = json.dumps(trace(chosen(written, list(written["rows"])))).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; bad input is one line on stderr and exit code 2."""
    run_command(command, arguments)

"""What users can set instead of the patch: each such setting runs in an mpirun of its own, interleaved with the others.

The environment of a rank cannot change within a run, so a repetition is one mpirun for the relays and one for each
setting; samples of all of them make the rows. Machine and moment are shared as far as separate jobs can share them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtllm_pp_progress.tools.bench.rows import Floor, merged
from trtllm_pp_progress.tools.bench.scenarios import ALTERNATIVES
from trtllm_pp_progress.tools.bench.table import print_table, write_json
from trtllm_pp_progress.tools.job.console import console, header
from trtllm_pp_progress.tools.job.launch import LaunchError, find_launcher, launch, made_by

__all__ = ["bench_with_alternatives"]


def bench_with_alternatives(
    pp: int,
    transport: str,
    timeout: float,
    policies: Sequence[str],
    scenarios: Sequence[str],
    repeat: int,
    json_file: Path | None,
    **numbers: Any,
) -> int:
    """Run relays and settings and print one table; return the exit code of the first job that failed, or 0.

    `numbers` are the bench's options that replace a scenario's, and its network. Raises LaunchError where a setting
    does not exist here.
    """
    if "async" in policies and made_by(find_launcher()[1]) != "MPICH":
        raise LaunchError("policy 'async' is MPICH's asynchronous progress, and mpirun here is not MPICH's")
    options = ["--pp", str(pp), "--transport", transport, "--scenarios", ",".join(scenarios), "--repeat", "1"]
    for name, value in numbers.items():
        options += [] if value is None else ["--" + name.replace("_", "-"), str(value)]
    relays = [policy for policy in policies if policy not in ALTERNATIVES]
    jobs = [("", relays)] if relays else []
    jobs += [(name, ["regressed"]) for name in policies if name in ALTERNATIVES]
    out, progress = console(sys.stdout), console(sys.stderr)
    parts: list[dict[str, Any]] = []
    first: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "part.json"
        for repetition in range(repeat):
            for setting, chosen in jobs:
                variables = ALTERNATIVES.get(setting, {})
                said = "".join(f", {name}={value}" for name, value in variables.items())
                progress.print(f"job {repetition + 1}/{repeat}: {','.join(chosen)}{said}")
                arguments = ["-m", "trtllm_pp_progress", "bench", *options, "--policies", ",".join(chosen)]
                code = launch(pp, transport, [*arguments, "--json", str(part)], timeout, variables, quiet=True)
                if code:
                    return code
                written = json.loads(part.read_text(encoding="utf-8"))
                first = first or written
                parts += [row | {"policy": setting or row["policy"]} for row in written["rows"]]
    found = [merged(parts, policy, scenario) for scenario in scenarios for policy in policies]
    rows = [row for row in found if row is not None]
    described, floors = first["environment"], [Floor(**floor) for floor in first["floor"]]
    out.print(header(described))
    print_table(rows, out, floors)
    if json_file is not None:
        write_json(json_file, rows, described, floors)
    return 0

"""End many processes in every way and see that no thread of ours is in MPI once it is finalized.

Usage: PYTHONPATH=tests/support exits.py [COUNT]; prints a line for each mode, exits with 1 if any end was not as it
should be.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from native_parts import ROOT, build

# Exit code, and the driver's state at the end of Python: where mpi4py finalizes MPI it goes on until then.
MODES = {
    "normal": (0, "armed"),
    "exception": (1, "armed"),
    "sys.exit": (3, "armed"),
    "thread": (0, "armed"),
    "by hand": (0, "stopped"),
    "in C": (0, "stopped"),
    "fork": (0, "stopped"),
    "never": (0, "armed"),
}


def fault(folder: Path, mode: str, announced: str = "announced") -> str:
    """End one process; return what was wrong with its end, or nothing."""
    code, state = MODES[mode]
    command = [sys.executable, ROOT / "tests/native/exit_once.py", folder, mode, announced]
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return "hung"
    if ended.returncode != code:
        return f"exit code {ended.returncode}: {ended.stdout!r} {ended.stderr[-500:]}"
    if f"state: {state}\n" not in ended.stdout or "late calls: 0, left: 1\n" not in ended.stdout:
        return f"too late: {ended.stdout!r}"
    return ""


def main(count: int) -> int:
    """Run every mode `count` times."""
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = build(Path(name))
        for mode in MODES:
            faults = [found for _ in range(count) if (found := fault(folder, mode))]
            failed += bool(faults)
            print(f"{mode:10} {count - len(faults)} of {count} as they should be", *faults[:1], flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100))

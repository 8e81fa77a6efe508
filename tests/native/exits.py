"""End many processes in every way and see that no thread of ours is in MPI when it is finalized.

Usage: exits.py [COUNT]; prints a line for each kind and mode, exits with 1 if any end was not as it should be.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODES = {"normal": 0, "exception": 1, "sys.exit": 3, "finalize": 0, "thread": 0}
COMPILE = ["cc", "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread", "-o"]


def build(folder: Path) -> Path:
    """Build the native part and the counter into a folder."""
    native = ROOT / "trtllm_pp_progress/native/understudy.c"
    subprocess.run([*COMPILE, folder / "understudy.abi3.so", native], check=True, timeout=60)
    subprocess.run([*COMPILE, folder / "counter.so", ROOT / "tests/native/counter.c"], check=True, timeout=60)
    return folder


def fault(folder: Path, kind: str, mode: str, guarded: str = "yes") -> str:
    """End one process; return what was wrong with its end, or nothing."""
    command = [sys.executable, ROOT / "tests/native/exit_once.py", folder, kind, mode, guarded]
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return "hung"
    if ended.returncode != CODES[mode]:
        return f"exit code {ended.returncode}: {ended.stderr[-500:]}"
    if "state: stopped" not in ended.stdout or "late calls: 0" not in ended.stdout:
        return f"too late: {ended.stdout!r}"
    return ""


def main(count: int) -> int:
    """Run every kind and mode `count` times."""
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = build(Path(name))
        for kind in ("native", "parked"):
            for mode in CODES:
                faults = [found for _ in range(count) if (found := fault(folder, kind, mode))]
                failed += bool(faults)
                print(f"{kind:7} {mode:10} {count - len(faults)} of {count} as they should be", *faults[:1], flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100))

"""Start one rank, cut it when its end takes too long, and note how it ended; exits as a shell would for it.

Usage: warden.py FOLDER LIMIT_S SCRIPT ARGUMENTS...    Its record is FOLDER/rank-N.jsonl, its output rank-N.txt.
A rank's end begins when it notes `ends`; from then on it has LIMIT_S.
"""

import os
import signal
import subprocess
import sys
import time

from twins.record import VARIABLE, note, read

STARTED_S = 60.0  # for what comes before its end
STACKS = signal.SIGUSR2  # at which a rank writes its stacks
RANK = next(os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK") if name in os.environ)


def watch(child, record, limit_s):
    """Return a rank's exit code, and whether it had to be cut."""
    latest = time.monotonic() + STARTED_S
    while (code := child.poll()) is None:
        time.sleep(0.02)
        if (ends := read(record).get("ends")) is not None:
            latest = ends["at"] + limit_s
        if time.monotonic() > latest:
            child.send_signal(STACKS)
            time.sleep(0.5)
            child.kill()
            return child.wait(), True
    return code, False


def main():
    """Run the rank to its end, or to its limit."""
    folder, limit_s, *line = sys.argv[1:]
    record = os.environ[VARIABLE] = os.path.join(folder, f"rank-{RANK}.jsonl")
    note("starts")
    with open(os.path.join(folder, f"rank-{RANK}.txt"), "w") as output:
        child = subprocess.Popen([sys.executable, *line], stdout=output, stderr=subprocess.STDOUT, close_fds=False)
    signal.signal(signal.SIGTERM, lambda *_: (note("ended by the launcher"), child.kill()))
    code, cut = watch(child, record, float(limit_s))
    note("cut" if cut else "ended", code=code)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()

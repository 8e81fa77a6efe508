"""Draw docs/watch.svg, README's picture of `watch`, from two readings; --record takes them anew of this host's rings.

python ci/picture.py [--record]
"""

import argparse
import io
import json
import re
import time
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from trtllm_pp_progress.tools.watch.live import render
from trtllm_pp_progress.tools.watch.readings import Reading, compare, read

DOCS = Path(__file__).parents[1] / "docs"
RECORDED = DOCS / "watch.json"
WINDOW_S = 2.0


def record():
    """Write two readings of what runs here."""
    readings = [read()]
    time.sleep(WINDOW_S)
    readings.append(read())
    RECORDED.write_text(json.dumps([asdict(replace(one, host="node-1")) for one in readings]) + "\n")


def draw():
    """Return the picture of the recorded readings."""
    before, now = (
        Reading(**(one | {"said": {int(pid): said for pid, said in one["said"].items()}}))
        for one in json.loads(RECORDED.read_text())
    )
    console = Console(record=True, width=150, file=io.StringIO(), force_terminal=True)
    console.print(render(compare(before, now), now))
    svg = console.export_svg(title="trtllm-pp-progress watch")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # which it would fetch from elsewhere


def main():
    """Draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    if parser.parse_args().record:
        record()
    (DOCS / "watch.svg").write_text(draw())


if __name__ == "__main__":
    main()

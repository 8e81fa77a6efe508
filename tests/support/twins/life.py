"""One rank of one twin, under warden.py. Usage: life.py CELL_AS_JSON patched|unpatched."""

import atexit
import json
import sys

from twins.record import note

executors = []


def shut_down():
    """Shut down what is up, once, as upstream's own exit handler does."""
    while executors:
        executors.pop().shutdown()
        note("closed")


cell, patched = json.loads(sys.argv[1]), sys.argv[2] == "patched"
if cell["end"] == "at exit, registered first":
    atexit.register(shut_down)

from twins.living import live  # noqa: E402  # it imports the package, whose exit handlers come after ours then

live(cell, patched, executors, shut_down)

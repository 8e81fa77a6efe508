"""A rank that does its work in a thread, as upstream's leader does, with variables that reach it by a message."""

import os
import sys
import threading
from importlib import import_module

from mpi4py import MPI

sent = {name: value for name, value in os.environ.items() if name.startswith("LATE_")}
for name, value in MPI.COMM_WORLD.bcast(sent).items():
    os.environ[name.removeprefix("LATE_")] = value
MPI.COMM_WORLD.Barrier()
thread = threading.Thread(target=import_module, args=("report",))
thread.start()
thread.join()
sys.exit("report" not in sys.modules)

"""Two workers of mpi4py's pool, which give their environment to it as upstream's MpiPoolSession does; each reports."""

import os
import sys
from importlib import import_module

from mpi4py.futures import MPIPoolExecutor, get_comm_workers

WORKERS = 2


def look(_):
    """Report, in a worker; the barrier sees that each worker gets one of these."""
    get_comm_workers().Barrier()
    import_module("report")


if __name__ == "__main__":
    late = {name.removeprefix("LATE_"): value for name, value in os.environ.items() if name.startswith("LATE_")}
    arguments = ["-c", os.environ["BOOTSTRAP"]] if "BOOTSTRAP" in os.environ else None
    with MPIPoolExecutor(max_workers=WORKERS, path=sys.path, env=late, python_args=arguments) as pool:
        list(pool.map(look, range(WORKERS)))

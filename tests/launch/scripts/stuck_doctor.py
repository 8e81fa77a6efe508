"""The doctor as a rank; rank 1 never says where it runs. Usage: stuck_doctor.py OPTIONS..."""

import os
import time

from trtllm_pp_progress import cli
from trtllm_pp_progress.tools.doctor import start

start.OTHERS_S = 3.0
if any(os.environ.get(name) == "1" for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK")):
    start.hosts_of_ranks = lambda comm: time.sleep(600)
cli.main()

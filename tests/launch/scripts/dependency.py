"""Each rank's executor waits, outside MPI, for the next rank to receive the schedule: python dependency.py POLICY."""

from common import RANK, arguments, begin, close, say
from rings import executor_of, generate

from trtllm_pp_progress.tools.host import RingStage, connect_pipeline

comm, line = begin()
(policy,) = arguments()
schedule = bytes(300_000)  # over TCP, MPICH 5.0 parks from 259,132 bytes on
stage = RingStage(*connect_pipeline(comm), 0.002, 65536, rendezvous=True)
with executor_of(comm, policy, stage=stage, schedule_payload=schedule, reentry_s=None) as executor:
    if RANK == 0:
        say("tokens", *generate(executor, 5)[0])
    line.meet()
    close(executor)
say("wrong", executor.wrong)

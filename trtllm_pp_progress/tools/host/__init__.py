"""The host executor: a pipeline of PyExecutor's shape with the relay of each era, to measure against and to test on.

An executor needs mpi4py at MPI_THREAD_MULTIPLE; importing this does not start MPI. It knows nothing of the patch:
`install(HostExecutor)` patches it as it patches TensorRT-LLM's.
"""

from trtllm_pp_progress.tools.host.connect import connect_pipeline, own_address
from trtllm_pp_progress.tools.host.dist import Dist, PPCommTag
from trtllm_pp_progress.tools.host.executor import HostExecutor
from trtllm_pp_progress.tools.host.relays import (
    POLICIES,
    FlushExecutor,
    InlineExecutor,
    IprobeExecutor,
    OneshotExecutor,
)
from trtllm_pp_progress.tools.host.ring import RingStage
from trtllm_pp_progress.tools.host.state import (
    BatchStatePP,
    Request,
    Sampled,
    SampleState,
    Scheduled,
    Stage,
    Transfer,
)

__all__ = [
    "POLICIES",
    "BatchStatePP",
    "Dist",
    "FlushExecutor",
    "HostExecutor",
    "InlineExecutor",
    "IprobeExecutor",
    "OneshotExecutor",
    "PPCommTag",
    "Request",
    "RingStage",
    "SampleState",
    "Sampled",
    "Scheduled",
    "Stage",
    "Transfer",
    "connect_pipeline",
    "own_address",
]

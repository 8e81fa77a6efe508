"""The host executor: a pipeline of PyExecutor's shape with the relay of each era, to measure against and to test on.

Needs mpi4py at MPI_THREAD_MULTIPLE. It knows nothing of the patch; `trtllm_pp_progress.install(HostExecutor)` patches
it as it patches TensorRT-LLM's.
"""

from trtllm_pp_progress.host._dist import Dist, PPCommTag, abort_on_failure, require_thread_multiple
from trtllm_pp_progress.host._executor import HostExecutor
from trtllm_pp_progress.host._relays import (
    POLICIES,
    FlushExecutor,
    InlineExecutor,
    IprobeExecutor,
    OneshotExecutor,
)
from trtllm_pp_progress.host._ring import RingStage, connect_pipeline
from trtllm_pp_progress.host._state import BatchStatePP, Host, Request, SampleState, Scheduled, Stage

__all__ = [
    "POLICIES",
    "BatchStatePP",
    "Dist",
    "FlushExecutor",
    "Host",
    "HostExecutor",
    "InlineExecutor",
    "IprobeExecutor",
    "OneshotExecutor",
    "PPCommTag",
    "Request",
    "RingStage",
    "SampleState",
    "Scheduled",
    "Stage",
    "abort_on_failure",
    "connect_pipeline",
    "require_thread_multiple",
]

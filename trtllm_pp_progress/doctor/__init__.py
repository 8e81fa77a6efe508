"""The doctor: is pipeline-parallel feedback parked here, would the patch cure it, and what is in the way.

`collect()` returns plain data, docs/doctor.md lists its keys; it answers without MPI, GPU or TensorRT-LLM. What may
hang or crash is imported by a child process with a deadline, never by this one.
"""

from trtllm_pp_progress.doctor._collect import collect
from trtllm_pp_progress.doctor._findings import EXIT_CODES

__all__ = ["EXIT_CODES", "collect"]

"""The doctor: is pipeline-parallel feedback parked here, would the patch cure it, and what is in the way.

`collect()` returns plain data, docs/doctor.md lists its keys; it answers without MPI, GPU or TensorRT-LLM. What may
hang or crash is imported by a child process with a deadline, never by this one. What an environment leads to is a kind
of finding (on_*.py): a new one is a Kind and a line in the rule beside it.
"""

from trtllm_pp_progress.tools.doctor.findings import EXIT_CODES
from trtllm_pp_progress.tools.doctor.report import collect

__all__ = ["EXIT_CODES", "collect"]

"""Doubles of TensorRT-LLM's PyExecutor, one of each era, in our own words: see ASSUMPTIONS.md.

They have upstream's names, signatures and order of calls as far as the package looks at them, and run the ring over any
communicator. They know nothing of the package.
"""

from doubles.eras import ERAS, INLINE, PATCHED, executor_class
from doubles.world import BatchStatePP, MPIDist, Request, SampleState, TorchDist, set_mpi_comm

__all__ = [
    "ERAS",
    "INLINE",
    "PATCHED",
    "BatchStatePP",
    "MPIDist",
    "Request",
    "SampleState",
    "TorchDist",
    "executor_class",
    "set_mpi_comm",
]

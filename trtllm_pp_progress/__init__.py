"""Keep TensorRT-LLM's pipeline-parallel ring moving between decode steps, without touching its source.

    import trtllm_pp_progress
    trtllm_pp_progress.install()     # before the executor is constructed
    trtllm_pp_progress.status()      # what is patched, and every counter
    trtllm_pp_progress.uninstall()

Importing this package imports neither mpi4py nor torch nor TensorRT-LLM.
"""

from trtllm_pp_progress.installation.install import (
    IncompatibleError,
    Installation,
    install,
    installed,
    status,
    uninstall,
)
from trtllm_pp_progress.patching.patch import PatchError
from trtllm_pp_progress.settings.core import Settings
from trtllm_pp_progress.settings.schema import SettingsError
from trtllm_pp_progress.settings.version import __version__  # noqa: F401

__all__ = [
    "IncompatibleError",
    "Installation",
    "PatchError",
    "Settings",
    "SettingsError",
    "install",
    "installed",
    "status",
    "uninstall",
]

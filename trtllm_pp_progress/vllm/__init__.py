"""Post the sampled-result receives of vLLM's pipeline parallelism when they are about to be consumed.

    TRTLLM_PP_PROGRESS_VLLM_RECEIVE=on vllm serve MODEL --pipeline-parallel-size 4

is all it takes beside the installed package: vLLM's plugin entry point does the rest in every worker. Off by default.
Importing this package imports neither torch nor vLLM.
"""

from trtllm_pp_progress.vllm._gates import ReceiveRefused
from trtllm_pp_progress.vllm._install import attach, install, installed, status, uninstall
from trtllm_pp_progress.vllm._settings import ReceiveSettings, SettingsError

__all__ = [
    "ReceiveRefused",
    "ReceiveSettings",
    "SettingsError",
    "attach",
    "install",
    "installed",
    "status",
    "uninstall",
]

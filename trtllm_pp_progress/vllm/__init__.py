"""Post the sampled-result receives of vLLM's pipeline parallelism when they are about to be consumed.

    TRTLLM_PP_PROGRESS_VLLM_RECEIVE=on vllm serve MODEL --pipeline-parallel-size 4

is all it takes beside the installed package: vLLM's plugin entry point does the rest in every worker. Off by default.
Importing this package imports neither torch nor vLLM.
"""

from trtllm_pp_progress.patching.patch import IncompatibleError
from trtllm_pp_progress.settings.schema import SettingsError
from trtllm_pp_progress.vllm.installation import Installation, attach, install, installed, status, uninstall
from trtllm_pp_progress.vllm.settings import Settings

__all__ = [
    "IncompatibleError",
    "Installation",
    "Settings",
    "SettingsError",
    "attach",
    "install",
    "installed",
    "status",
    "uninstall",
]

"""Install by import: `import trtllm_pp_progress.auto`, before or after TensorRT-LLM is imported; never raises.

What could not be installed, and why, is logged and shown by `trtllm_pp_progress.status()`.
"""

from trtllm_pp_progress._install import install_automatically

install_automatically()

"""Install by import: `import trtllm_pp_progress.auto`, before or after TensorRT-LLM is imported; never raises.

What was done, or what could not be and why, is logged once, to stderr where the program has not set logging up;
`trtllm_pp_progress.status()` shows it, too.
"""

from trtllm_pp_progress.installation.automatic import begin

begin()

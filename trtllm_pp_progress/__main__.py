"""`python -m trtllm_pp_progress` is `trtllm-pp-progress`."""

from trtllm_pp_progress.cli import main

main()

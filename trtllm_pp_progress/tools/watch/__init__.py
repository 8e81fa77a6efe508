"""See patched processes from outside: what their rings do, what driving is worth, and their metrics.

All of it asks the doors of living processes (trtllm_pp_progress.door); nothing is imported into them.
"""

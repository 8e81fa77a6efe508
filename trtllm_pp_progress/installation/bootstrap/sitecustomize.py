"""On PYTHONPATH by `trtllm-pp-progress run`, every Python runs this at its start: the gate, then the user's own."""

import os
import sys

here = os.path.dirname(__file__)
root = os.path.dirname(os.path.dirname(os.path.dirname(here)))

sys.path.insert(0, root)  # another Python than ours may not have the gate on its path
try:
    import _trtllm_pp_progress_gate  # noqa: F401  # does nothing if the .pth has imported it already
finally:
    sys.path.remove(root)
sys.path[:] = [entry for entry in sys.path if entry != here]
del sys.modules["sitecustomize"]
import sitecustomize  # noqa: E402, F401  # site ignores that there is none

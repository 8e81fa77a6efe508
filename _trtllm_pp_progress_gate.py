"""The late gate: when TensorRT-LLM's executor module is imported, ask TRTLLM_PP_PROGRESS whether to patch.

`trtllm_pp_progress.pth` imports this at every start of Python, and so does the launcher's sitecustomize. It lies beside
the package because importing anything of the package would cost every Python program of the environment its 20 ms. The
variable is read at the last moment: workers of an MPI pool get theirs after the interpreter has started (mpi4py.futures
and upstream's worker_main both write it to os.environ). Until then each import costs one comparison of two names.
"""

import sys  # and nothing else: every Python program of the environment would pay for it

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["TARGET", "close"]

TARGET = "tensorrt_llm._torch.pyexecutor.py_executor"


class _Gate:
    """A finder that finds nothing itself."""

    @staticmethod
    def find_spec(name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        """Return None for every module but the target of a process that is to be patched."""
        if name != TARGET:
            return None
        import os

        if os.environ.get("TRTLLM_PP_PROGRESS", "").strip().lower() in ("", "0", "false"):
            return None
        close()
        from importlib import import_module

        try:
            # Hooks the import that is under way. Not `auto`: the program may want to import that for the first time.
            import_module("trtllm_pp_progress.installation.automatic").begin()
        except Exception as error:
            print(f"trtllm-pp-progress: cannot be imported by {sys.executable}: {error}", file=sys.stderr)
        # All are asked, for those that stand before us now would be passed over; and without importing the parent
        # package, which may be waiting for this very import.
        finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
        return next((spec for finder in finders if (spec := finder.find_spec(name, path, target))), None)


def close() -> None:
    """Let nothing happen any more when the target is imported."""
    if _Gate in sys.meta_path:
        sys.meta_path.remove(_Gate)


sys.meta_path.insert(0, _Gate)

"""What the automatic ways in do: install, and open the door for who wants to look."""

from __future__ import annotations

import logging

from trtllm_pp_progress.door.place import DoorError
from trtllm_pp_progress.door.server import DOOR
from trtllm_pp_progress.installation.install import install_automatically, status
from trtllm_pp_progress.installation.orders import answer
from trtllm_pp_progress.settings.core import Settings
from trtllm_pp_progress.settings.schema import load

__all__ = ["begin"]

logger = logging.getLogger("trtllm_pp_progress")


def begin() -> None:
    """Install as install() does, and open the door unless TRTLLM_PP_PROGRESS_DOOR is 0; never raises."""
    install_automatically()
    done = status()
    try:
        if (done["installed"] or done["waiting"]) and load(Settings).door == "1":
            DOOR.add("tensorrt_llm", answer)
    except (DoorError, OSError) as error:
        logger.warning("no door, `trtllm-pp-progress watch` will not see this process: %s", error)
    except Exception as error:  # whatever it is, serving starts
        logger.warning("no door: %r", error)

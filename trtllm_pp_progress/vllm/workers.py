"""How a vLLM process's worker gets the policy once its device is there, and what is said where it does not."""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any

from trtllm_pp_progress.door.place import DoorError
from trtllm_pp_progress.door.server import DOOR
from trtllm_pp_progress.patching.patch import Graft, IncompatibleError
from trtllm_pp_progress.settings.core import Settings as CoreSettings
from trtllm_pp_progress.settings.schema import SettingsError, load
from trtllm_pp_progress.vllm.settings import OFF, Settings, load_settings
from trtllm_pp_progress.vllm.shape import steps_past_worker

__all__ = ["CLASS", "MODULE", "STOOD_DOWN", "attach", "attached", "grafts", "open_door", "stand_down"]

logger = logging.getLogger("vllm.trtllm_pp_progress")

MODULE = "vllm.v1.worker.worker_base"
CLASS = "WorkerWrapperBase"
STATUS = "receive_policy_status"  # what collective_rpc takes by name

STOOD_DOWN: list[str] = []  # why the policy stands aside, in this process or on one of its workers


def grafts(module: ModuleType, settings: Settings, status: Any, automatic: bool) -> list[Graft]:
    """Return what attaches the policy to every worker whose device is initialised from now on."""
    wrapper = getattr(module, CLASS, None)
    if not isinstance(wrapper, type):
        raise IncompatibleError(f"this vLLM release is not known: {MODULE} has no {CLASS}")

    def make(stock: Any) -> Any:
        def init_device(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
            answer = stock(wrapper, *args, **kwargs)
            if _attach_or_leave(wrapper, settings) and automatic:
                open_door(status)
            return answer

        return init_device

    def receive_policy_status(wrapper: Any) -> Any:
        """Return status(): for collective_rpc, which takes a method's name from anybody, and a function from few."""
        return status()

    return [Graft(wrapper, "init_device", make), Graft(wrapper, STATUS, lambda _: receive_policy_status)]


def attach(worker: Any, settings: Settings | None = None, **arguments: Any) -> None:
    """Attach the policy to one worker between its init_device and its compile_or_warm_up_model.

    For programs that build workers themselves. Raises IncompatibleError where the policy does not apply, and
    SettingsError.
    """
    from trtllm_pp_progress.vllm.attachment import Attachment

    settings = load_settings(**arguments) if settings is None else settings
    if settings.receive == OFF:
        raise IncompatibleError("receive is off")
    # The worker's own methods lead to the attachment from now on and keep it alive.
    Attachment(worker, settings)


def attached() -> list[Any]:
    """Return the attachments of this process; asking imports nothing."""
    module = sys.modules.get("trtllm_pp_progress.vllm.attachment")
    return list(module.attachments) if module else []


def stand_down(reason: str, level: int = logging.ERROR) -> None:
    """Say once why vLLM is left as it is; what is no mistake of anybody's is no error."""
    STOOD_DOWN.append(reason)
    logger.log(level, "receive policy stays off, vLLM is as it was: %s", reason)


def open_door(status: Any) -> None:
    """Let `trtllm-pp-progress watch` and its like see this worker, as the core does."""
    try:
        if load(CoreSettings).door == "1":
            DOOR.add("vllm", lambda request: status())
    except (DoorError, OSError, SettingsError) as error:
        logger.warning("no door, `trtllm-pp-progress watch` will not see this process: %s", error)


def _attach_or_leave(wrapper: Any, settings: Settings) -> bool:
    try:
        if reason := steps_past_worker(wrapper):
            raise IncompatibleError(reason)
        attach(wrapper.worker, settings)
        return True
    except SettingsError as error:
        stand_down(str(error))
    except IncompatibleError as error:
        stand_down(str(error), logging.WARNING)
    except Exception as error:
        stand_down(f"could not be attached: {error!r}")
    return False

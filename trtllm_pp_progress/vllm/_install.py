"""install, attach, status: how the receive policy gets to vLLM's workers."""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

from trtllm_pp_progress._patch import Graft, Patch
from trtllm_pp_progress._settings import PREFIX
from trtllm_pp_progress.vllm._gates import ReceiveRefused
from trtllm_pp_progress.vllm._settings import OFF, ReceiveSettings, SettingsError, load_settings

__all__ = ["attach", "install", "installed", "register", "status", "uninstall"]

logger = logging.getLogger("vllm.trtllm_pp_progress")

_lock = threading.RLock()
_patch: Patch | None = None
_refused: list[str] = []  # why the policy stands aside on workers of this process


def install(**arguments: Any) -> ReceiveSettings:
    """Attach the policy to every vLLM worker of this process whose device is initialised from now on.

    Settings come from arguments, the environment and defaults; with receive=off nothing is installed and vLLM is not
    imported. Raises SettingsError for a bad setting. A worker that the policy does not apply to is left stock, with one
    line in its log. A second call changes nothing. Where a worker is a process of its own, this has to run there: the
    entry point of vllm.general_plugins does.
    """
    global _patch
    settings = load_settings(**arguments)
    with _lock:
        if settings.receive == OFF or _patch is not None:
            return settings
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        def make(stock: Any) -> Any:
            def init_device(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
                answer = stock(wrapper, *args, **kwargs)
                _attach_or_leave(wrapper.worker, settings)
                return answer

            return init_device

        _patch = Patch([Graft(WorkerWrapperBase, "init_device", make)])
    return settings


def uninstall() -> None:
    """Undo install() and attach(): detach the policy from every worker of this process, everything posted."""
    global _patch
    with _lock:
        if _patch is not None:
            _patch.revert()
            _patch = None
        for attachment in _attachments():
            attachment.detach()


def installed() -> bool:
    """Tell whether workers of this process get the policy."""
    return _patch is not None


def attach(worker: Any, settings: ReceiveSettings | None = None, **arguments: Any) -> None:
    """Attach the policy to one worker between its init_device and its compile_or_warm_up_model.

    For programs that build workers themselves. Raises ReceiveRefused where the policy does not apply, and
    SettingsError.
    """
    from trtllm_pp_progress.vllm._attach import Attachment

    settings = load_settings(**arguments) if settings is None else settings
    if settings.receive == OFF:
        raise ReceiveRefused("receive is off")
    # The worker's own methods lead to the attachment from now on and keep it alive.
    Attachment(worker, settings)


def status() -> dict[str, Any]:
    """Return what is installed in this process, why workers were left stock, and every attached worker's counters."""
    with _lock:
        workers = sorted((attachment.status() for attachment in _attachments()), key=lambda found: int(found["rank"]))
        return {"installed": installed(), "refused": list(_refused), "workers": workers}


def register() -> None:
    """Install where the environment says so: the entry point that vLLM calls in each of its processes.

    Raises SettingsError, and so keeps vLLM from starting, for a bad setting alone. Anything else that goes wrong is
    logged and leaves vLLM stock.
    """
    try:
        if install().receive != OFF:
            _carry_to_ray()
    except SettingsError:
        raise
    except Exception as error:
        _leave(f"could not be installed: {error}")


def _attachments() -> list[Any]:
    """Return the attachments of this process; asking imports nothing."""
    module = sys.modules.get("trtllm_pp_progress.vllm._attach")
    return list(module.attachments) if module else []


def _attach_or_leave(worker: Any, settings: ReceiveSettings) -> None:
    try:
        attach(worker, settings)
    except SettingsError:
        raise
    except ReceiveRefused as reason:
        _leave(str(reason))
    except Exception as error:
        _leave(f"could not be attached: {error!r}")


def _leave(reason: str) -> None:
    _refused.append(reason)
    logger.warning("receive policy stays off, vLLM is as it was: %s", reason)


def _carry_to_ray() -> None:
    """Have the settings copied to Ray workers, which get only variables with prefixes that vLLM lists."""
    try:
        from vllm.ray.ray_env import DEFAULT_ENV_VAR_PREFIXES
    except ImportError:
        return
    DEFAULT_ENV_VAR_PREFIXES.add(PREFIX)

"""install, uninstall, installed, status, register: how the receive policy gets into vLLM's processes, and out again."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any

from trtllm_pp_progress.patching.import_hook import when_imported
from trtllm_pp_progress.patching.patch import Graft, Patch
from trtllm_pp_progress.settings.schema import PREFIX, SettingsError
from trtllm_pp_progress.vllm import pause, workers
from trtllm_pp_progress.vllm.settings import OFF, Settings, load_settings, unknown_variables, variables
from trtllm_pp_progress.vllm.workers import MODULE, STOOD_DOWN, attach, attached, stand_down

__all__ = ["Installation", "attach", "install", "installed", "register", "status", "uninstall"]

logger = logging.getLogger("vllm.trtllm_pp_progress")

TARGET = f"{MODULE}.{workers.CLASS}"
RAY = "vllm.ray.ray_env"

_lock = threading.RLock()
_patches: dict[str, Patch] = {}  # by module
_waiting: dict[str, Callable[[], None]] = {}  # what calls off the wait for a module's import


@dataclass(frozen=True)
class Installation:
    """What install() did; as a context manager it undoes that, and no more, at the end of the block."""

    target: str
    state: str  # "installed" or "waiting for the import of <module>", "already" before it where nothing was done; "off"
    settings: Settings

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.state != OFF and not self.state.startswith("already"):
            uninstall()


def install(settings: Settings | None = None, **arguments: Any) -> Installation:
    """Attach the policy to every vLLM worker of this process whose device is initialised from now on.

    Settings come from `settings`, or from arguments, the environment and defaults; with receive=off nothing is
    installed. vLLM is not imported: not imported yet, its worker's module is patched as soon as that is. A second call
    changes nothing and says so. Raises SettingsError for a bad setting, and IncompatibleError where vLLM has no such
    class. A worker that the policy does not apply to is left stock, with one line in its log. Where a worker is a
    process of its own, this has to run there: the entry point of vllm.general_plugins does.
    """
    if settings is None:
        settings = load_settings(**arguments)
    elif arguments:
        raise SettingsError(f"settings are given, and {', '.join(arguments)} as well: give one or the other")
    return _install(settings)


def uninstall() -> list[str]:
    """Undo install() and attach(), and return what was restored; without an install, nothing.

    The policy is detached from every worker of this process, everything posted. Raises PatchError, with nothing
    changed, if somebody patched over ours.
    """
    with _lock:
        for patch in _patches.values():
            patch.check()
        restored = [name for patch in _patches.values() for name in patch.names]
        while _patches:
            _patches.popitem()[1].revert()
        while _waiting:
            _waiting.popitem()[1]()
        for attachment in attached():
            attachment.detach()
        return restored


def installed() -> bool:
    """Tell whether workers of this process get the policy."""
    return MODULE in _patches


def status() -> dict[str, Any]:
    """Return what is installed in this process, why workers were left stock, and every attached worker's counters."""
    with _lock:
        return {
            "installed": installed(),
            "waiting": MODULE if MODULE in _waiting else None,
            "stood_down": list(STOOD_DOWN),
            "workers": sorted((found.status() for found in attached()), key=lambda worker: int(worker["rank"])),
        }


def register() -> None:
    """Install where the environment says so: the entry point that vLLM calls in each of its processes.

    Never raises: what is wrong is one line of the log, a bad setting's with the valid ones, and vLLM starts as it is.
    """
    try:
        for name in unknown_variables():
            logger.warning("%s is no setting and is not read: valid ones are %s", name, ", ".join(variables()))
        _install(load_settings(), automatic=True)
    except SettingsError as error:
        stand_down(str(error))
    except Exception as error:
        stand_down(f"could not be installed: {error}")


def _install(settings: Settings, automatic: bool = False) -> Installation:
    with _lock:
        if settings.receive == OFF:
            return Installation(TARGET, OFF, settings)
        state = "installed" if installed() else f"waiting for the import of {MODULE}"
        if installed() or MODULE in _waiting:
            logger.warning("already %s: nothing changed", state)
            return Installation(TARGET, f"already {state}", settings)
        _when_there(MODULE, lambda module: workers.grafts(module, settings, status, automatic))
        _when_there(pause.MODULE, pause.grafts)
        if automatic:
            _when_there(RAY, _carry)
        return Installation(TARGET, "installed" if installed() else state, settings)


def _when_there(name: str, grafts: Callable[[ModuleType], list[Graft]]) -> None:
    """Patch a module of vLLM's, now or as soon as it is imported."""
    if name in sys.modules:
        _patches[name] = Patch(grafts(sys.modules[name]))
        return

    def imported(module: ModuleType) -> None:
        with _lock:
            try:
                if _waiting.pop(name, None) is not None:
                    _patches[name] = Patch(grafts(module))
            except Exception as error:  # it would fail vLLM's import
                stand_down(f"could not be installed: {error}")

    _waiting[name] = when_imported(name, imported)


def _carry(module: ModuleType) -> list[Graft]:
    """Have the settings copied to Ray workers, which get only variables with prefixes that vLLM lists."""
    known = isinstance(getattr(module, "DEFAULT_ENV_VAR_PREFIXES", None), set)
    return [Graft(module, "DEFAULT_ENV_VAR_PREFIXES", lambda prefixes: {*prefixes, PREFIX})] if known else []

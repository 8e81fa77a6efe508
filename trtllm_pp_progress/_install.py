"""install, uninstall, installed, status: the patch list meets a class, at once or when its module is imported."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from dataclasses import asdict, dataclass
from types import ModuleType, TracebackType
from typing import Any

import wrapt

from trtllm_pp_progress._compat import Compatibility, examine, recognise
from trtllm_pp_progress._messages import be_heard
from trtllm_pp_progress._mixin import engine_of, grafts
from trtllm_pp_progress._patch import Patch
from trtllm_pp_progress._settings import SWITCH, Settings, SettingsError, load, switched_on
from trtllm_pp_progress._understudy import before_finalize

__all__ = ["IncompatibleError", "Installation", "install", "install_automatically", "installed", "status", "uninstall"]

logger = logging.getLogger("trtllm_pp_progress")

MODULE = "tensorrt_llm._torch.pyexecutor.py_executor"
CLASS = "PyExecutor"
GATE = "_trtllm_pp_progress_gate"


class IncompatibleError(RuntimeError):
    """The class is not of a shape that can be patched; the message says why. Nothing was changed."""


@dataclass(eq=False)
class _Record:
    compatibility: Compatibility
    patch: Patch
    settings: Settings
    executors: weakref.WeakSet[Any]


_lock = threading.RLock()
_installed: dict[type, _Record] = {}
_waiting: Settings | None = None  # an install() that waits for upstream's module to be imported
_hooked = False
_refused: list[str] = []  # why an automatic install stood down


@dataclass(frozen=True)
class Installation:
    """What install() did; as a context manager it undoes that, and no more, at the end of the block."""

    target: str
    state: str  # "installed" or "waiting for the import of <module>", with "already" before it where nothing was done
    compatibility: Compatibility | None = None
    cls: type | None = None

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if not self.state.startswith("already"):
            _undo(self.cls)


def install(target: type | None = None, settings: Settings | None = None, **arguments: Any) -> Installation:
    """Patch a PyExecutor-shaped class, by default TensorRT-LLM's; call it before an executor is constructed.

    Not imported yet, upstream's class is patched as soon as its module is imported. A second call changes nothing and
    says so. Settings come from `settings`, or from arguments, the environment and defaults (see Settings). All or
    nothing: raises IncompatibleError for a shape that is not known or has nothing to gain, SettingsError for a bad
    setting, and leaves the class as it was. Executors constructed before keep upstream's relay.
    """
    if settings is None:
        settings = load(Settings, **arguments)
    elif arguments:
        raise SettingsError(f"settings are given, and {', '.join(arguments)} as well: give one or the other")
    with _lock:
        if target is None and (target := _upstream()) is None:
            if sys.modules.get(MODULE) is not None:
                raise IncompatibleError(
                    f"{MODULE} has no {CLASS} (yet): install before its import begins, or after its end"
                )
            return _wait_for_import(settings)
        if not isinstance(target, type):
            raise IncompatibleError(f"{CLASS} is not a class but {target!r}")
        if target in _installed:
            logger.warning("already installed on %s: nothing changed", target.__qualname__)
            return Installation(_name(target), "already installed", _installed[target].compatibility, target)
        compatibility = recognise(target)
        if not compatibility.patch:
            raise IncompatibleError(
                f"{_name(target)} is left as it is (era {compatibility.era}): {compatibility.reason}"
            )
        executors: weakref.WeakSet[Any] = weakref.WeakSet()

        def born(executor: Any) -> None:
            executors.add(executor)
            before_finalize(_retire_all)

        patch = Patch(grafts(target, settings, born))
        _installed[target] = _Record(compatibility, patch, settings, executors)
        logger.info("installed on %s (era %s): %s", _name(target), compatibility.era, compatibility.reason)
        return Installation(_name(target), "installed", compatibility, target)


def uninstall(target: type | None = None) -> list[str]:
    """Put the originals back, of one class or of all, and return what was restored; without an install, nothing.

    Executors that live are upstream's again: their engines retire, for upstream's own wait must not meet a test of the
    same request. Without a target, what waits for upstream's import is called off, the late gate included. Raises
    PatchError, with nothing changed, if somebody patched over ours.
    """
    global _waiting
    with _lock:
        restored: list[str] = []
        records = {cls: record for cls, record in _installed.items() if target in (None, cls)}
        for record in records.values():
            record.patch.check()
        for cls, record in records.items():
            _retire(record)  # before upstream's wait is back, which must not meet a test
            restored += record.patch.names
            record.patch.revert()
            del _installed[cls]
        if target is None:
            _waiting = None
            if gate := sys.modules.get(GATE):
                gate.close()
        return restored


def installed(target: type | None = None) -> bool:
    """Tell whether a class (by default upstream's, or any if that is not imported) is patched now."""
    target = _upstream() if target is None else target
    return bool(_installed) if target is None else target in _installed


def status() -> dict[str, Any]:
    """Return what is installed where, why not, the settings, and every living executor's verdict and counters.

    Its keys are listed in docs/status.md.
    """
    with _lock:
        return {
            "installed": [
                {
                    "target": _name(cls),
                    "era": record.compatibility.era,
                    "action": record.compatibility.action,
                    "reason": record.compatibility.reason,
                    "settings": asdict(record.settings),
                    "executors": [
                        {"verdict": asdict(examine(executor, record.compatibility))} | engine.status()
                        for executor in list(record.executors)
                        if (engine := engine_of(executor))
                    ],
                }
                for cls, record in _installed.items()
            ],
            "waiting": MODULE if _waiting is not None else None,
            "stood_down": list(_refused),
        }


def install_automatically() -> None:
    """Install as install() does, but never raise: say once what was done or why not, and let serving start.

    TRTLLM_PP_PROGRESS=0 turns this off, whoever asks for it; an install() of before stays as it is.
    """
    be_heard()
    try:
        if switched_on() is False:
            raise IncompatibleError(f"{SWITCH} is 0")
        with _lock:
            if not installed() and _waiting is None:
                install()
    except Exception as error:
        _stand_down(error)


def _stand_down(error: Exception) -> None:
    # At ERROR: upstream drops warnings of all ranks but the leader.
    _refused.append(str(error))
    logger.error("not installed: %s", error)


def _undo(cls: type | None) -> None:
    """Uninstall from a class, or, without one, from upstream's, whether it was imported meanwhile or is waited for."""
    global _waiting
    with _lock:
        if cls is None:
            cls, _waiting = _upstream(), None
        if cls is not None:
            uninstall(cls)


def _retire(record: _Record) -> None:
    for executor in list(record.executors):
        if engine := engine_of(executor):
            engine.retire()


@atexit.register
def _retire_all() -> None:
    # A relay thread that is still up must not be inside MPI while it is finalized, which happens after this.
    for record in list(_installed.values()):
        _retire(record)


def _forked() -> None:
    # The executors are the parent's, whose threads may have held any lock of theirs: the child's exit waits for none.
    for record in _installed.values():
        record.executors.clear()


os.register_at_fork(after_in_child=_forked)


def _wait_for_import(settings: Settings) -> Installation:
    global _waiting, _hooked
    state = f"waiting for the import of {MODULE}"
    if _waiting is not None:
        logger.warning("already %s: nothing changed", state)
        return Installation(f"{MODULE}.{CLASS}", f"already {state}")
    _waiting = settings
    if not _hooked:
        wrapt.register_post_import_hook(_imported, MODULE)
        _hooked = True
    return Installation(f"{MODULE}.{CLASS}", state)


def _imported(module: ModuleType) -> None:
    """Install on the class of a module just imported; a hook that raised would fail upstream's import."""
    global _waiting
    with _lock:
        settings, _waiting = _waiting, None
        if settings is None:
            return
        try:
            install(getattr(module, CLASS), settings)
        except Exception as error:
            _stand_down(error)


def _upstream() -> type | None:
    cls = getattr(sys.modules.get(MODULE), CLASS, None)
    return cls if isinstance(cls, type) else None


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"

"""install, uninstall, installed, status: the patch list meets a class, at once or when its module is imported."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import ModuleType, TracebackType
from typing import Any

from trtllm_pp_progress.installation.ending import finish_all, retire_all
from trtllm_pp_progress.installation.records import INSTALLED, LOCK, Record, class_name
from trtllm_pp_progress.mpi.lifecycle import before_finalize
from trtllm_pp_progress.patching.import_hook import when_imported
from trtllm_pp_progress.patching.patch import IncompatibleError, Patch
from trtllm_pp_progress.progress.log import be_heard
from trtllm_pp_progress.pyexecutor.attachment import attachment_of
from trtllm_pp_progress.pyexecutor.grafts import Grafts
from trtllm_pp_progress.pyexecutor.shape import Compatibility, recognise
from trtllm_pp_progress.settings.core import SWITCH, Settings, switched_on
from trtllm_pp_progress.settings.schema import SettingsError, load

__all__ = [
    "CLASS",
    "GATE",
    "MODULE",
    "IncompatibleError",
    "Installation",
    "install",
    "install_automatically",
    "installed",
    "status",
    "uninstall",
]

logger = logging.getLogger("trtllm_pp_progress")

MODULE = "tensorrt_llm._torch.pyexecutor.py_executor"
CLASS = "PyExecutor"
GATE = "_trtllm_pp_progress_gate"


_call_off: Callable[[], None] | None = None  # of an install() that waits for upstream's module to be imported
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
    with LOCK:
        if target is None and (target := _upstream()) is None:
            if sys.modules.get(MODULE) is not None:
                raise IncompatibleError(
                    f"{MODULE} has no {CLASS} (yet): install before its import begins, or after its end"
                )
            return _wait_for_import(settings)
        if not isinstance(target, type):
            raise IncompatibleError(f"{CLASS} is not a class but {target!r}")
        if target in INSTALLED:
            logger.warning("already installed on %s: nothing changed", target.__qualname__)
            return Installation(class_name(target), "already installed", INSTALLED[target].compatibility, target)
        return _patch(target, settings)


def _patch(target: type, settings: Settings) -> Installation:
    verdict, name = recognise(target), class_name(target)
    if not verdict.patch:
        raise IncompatibleError(f"{name} is left as it is (era {verdict.era}): {verdict.reason}")
    executors: weakref.WeakSet[Any] = weakref.WeakSet()

    def born(executor: Any) -> None:
        executors.add(executor)
        before_finalize(retire_all)
        before_finalize(finish_all, running=True)  # set last, so called first

    patch = Patch(Grafts(target, verdict, settings, born).all())
    INSTALLED[target] = Record(verdict, patch, settings, executors)
    logger.info("installed on %s (era %s): %s", name, verdict.era, verdict.reason)
    return Installation(name, "installed", verdict, target)


def uninstall(target: type | None = None) -> list[str]:
    """Put the originals back, of one class or of all, and return what was restored; without an install, nothing.

    Executors that live are upstream's again: their engines retire, for upstream's own wait must not meet a test of the
    same request; a test that is stuck in MPI is waited for briefly, and named in the log. Without a target, what waits
    for upstream's import is called off, the late gate included. Raises PatchError, with nothing changed, if somebody
    patched over ours.
    """
    with LOCK:
        records = {cls: record for cls, record in INSTALLED.items() if target in (None, cls)}
        for record in records.values():
            record.patch.check()
        for cls in records:
            del INSTALLED[cls]  # nobody else reverts it
        if target is None:
            _stop_waiting()
            if gate := sys.modules.get(GATE):
                gate.close()
    restored: list[str] = []
    for record in records.values():  # the lock is free: status() and install() wait for no test
        for engine in record.engines():
            if not engine.retire():
                logger.error("a test of a send is stuck in MPI: it is left behind")
        restored += record.patch.names
        record.patch.revert()
        record.forget_values()
    return restored


def installed(target: type | None = None) -> bool:
    """Tell whether a class (by default upstream's, or any if that is not imported) is patched now."""
    target = _upstream() if target is None else target
    return bool(INSTALLED) if target is None else target in INSTALLED


def status() -> dict[str, Any]:
    """Return what is installed where, why not, the settings, and every living executor's verdict and counters.

    Its keys are listed in docs/status.md. Takes no lock.
    """
    return {
        "installed": [
            {
                "target": class_name(cls),
                "era": record.compatibility.era,
                "action": record.compatibility.action.value,
                "reason": record.compatibility.reason,
                "settings": asdict(record.settings),
                "executors": [_describe(executor) for executor in list(record.executors) if attachment_of(executor)],
            }
            for cls, record in list(INSTALLED.items())
        ],
        "waiting": MODULE if _call_off is not None else None,
        "stood_down": list(_refused),
    }


def _describe(executor: Any) -> dict[str, Any]:
    attachment = attachment_of(executor)
    assert attachment is not None
    return {"verdict": attachment.verdict(executor).describe()} | attachment.engine.status()


def install_automatically() -> None:
    """Install as install() does, but never raise: say once what was done or why not, and let serving start.

    TRTLLM_PP_PROGRESS=0 turns this off, whoever asks for it; an install() of before stays as it is.
    """
    be_heard()
    try:
        if switched_on() is False:
            raise IncompatibleError(f"{SWITCH} is 0")
        with LOCK:
            if not installed() and _call_off is None:
                install()
    except Exception as error:
        _stand_down(error)


def _stand_down(error: Exception) -> None:
    # At ERROR: upstream drops warnings of all ranks but the leader.
    _refused.append(str(error))
    logger.error("not installed: %s", error)


def _undo(cls: type | None) -> None:
    """Uninstall from a class, or, without one, from upstream's, whether it was imported meanwhile or is waited for."""
    with LOCK:
        if cls is None:
            cls = _upstream()
            _stop_waiting()
    if cls is not None:
        uninstall(cls)


def _wait_for_import(settings: Settings) -> Installation:
    global _call_off
    state = f"waiting for the import of {MODULE}"
    if _call_off is not None:
        logger.warning("already %s: nothing changed", state)
        return Installation(f"{MODULE}.{CLASS}", f"already {state}")

    def imported(module: ModuleType) -> None:
        """Install on the class of a module just imported; a hook that raised would fail upstream's import."""
        global _call_off
        with LOCK:
            if _call_off is None:
                return
            _call_off = None
            try:
                install(getattr(module, CLASS), settings)
            except Exception as error:
                _stand_down(error)

    _call_off = when_imported(MODULE, imported)
    return Installation(f"{MODULE}.{CLASS}", state)


def _stop_waiting() -> None:
    global _call_off
    if _call_off is not None:
        _call_off()
        _call_off = None


def _upstream() -> type | None:
    cls = getattr(sys.modules.get(MODULE), CLASS, None)
    return cls if isinstance(cls, type) else None

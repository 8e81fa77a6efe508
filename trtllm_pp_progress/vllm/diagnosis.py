"""Whether a vLLM worker started like this would get the receive policy, and why not: for the doctor and the launcher.

Looks at names, versions and entry points alone: imports neither torch nor vLLM.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata

from trtllm_pp_progress.settings.schema import PREFIX, SettingsError
from trtllm_pp_progress.vllm.settings import (
    OFF,
    VLLM_PREFIX,
    WATCH,
    Settings,
    environment,
    load_settings,
    unknown_variables,
    variables,
)
from trtllm_pp_progress.vllm.shape import ITS_VARIABLE
from trtllm_pp_progress.vllm.transport import shared_queues

__all__ = ["findings"]

GROUP, NAME, ENTRY = "vllm.general_plugins", "trtllm_pp_progress", "trtllm_pp_progress.vllm.installation:register"
OLDEST, NEWEST = (0, 28), (0, 33)  # what the tests run on
DEFAULT_SINCE = (0, 30)  # Model Runner V2 for most models
RECEIVE = VLLM_PREFIX + "RECEIVE"
TURN_ON = f"set {RECEIVE}=on where the workers start"
INSTALL = "install the package with pip in the environment that vLLM runs in"

Finding = tuple[str, str, str, str]  # id, severity, what it means, what to do


def findings(environ: Mapping[str, str] | None = None, path: Sequence[str] | None = None) -> list[dict[str, str]]:
    """Return what is worth knowing, the worst first: id, severity (error, warning, info), what it means, what to do.

    Of processes that are started like this one: with these variables (`os.environ` if not given), and with `path`
    (`sys.path` if not given) to import from. Nothing is said where neither vLLM is here nor a variable of the policy is
    set.
    """
    environ = environment() if environ is None else environ
    path = list(sys.path if path is None else path)
    vllm = _distribution("vllm", path)
    release = vllm.version if vllm else ""
    set_here = [name for name in environ if name.startswith(VLLM_PREFIX)]
    found = [*_variables(environ)]
    if release or set_here:
        found += _outcome(environ, path, release)
    found.sort(key=lambda finding: ("error", "warning", "info").index(finding[1]))
    return [dict(zip(("id", "severity", "means", "do"), finding, strict=True)) for finding in found]


def _variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Name variables that look like a setting and are none."""
    known = variables()
    unknown = unknown_variables(environ)
    for name in sorted(environ):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        prefixed = name.startswith(PREFIX)  # and so one of the core's, which has a doctor of its own
        if name in unknown or (near and name not in known and not prefixed):
            meant = near[0] if near else ", ".join(known)
            yield "vllm-variable", "error", f"{name} is no setting and is not read", f"did you mean {meant}?"


def _outcome(environ: Mapping[str, str], path: Sequence[str], release: str) -> Iterator[Finding]:
    """Say what will happen, and what stands in its way."""
    if not release:
        yield "vllm-absent", "warning", "vLLM is not installed here", "run this where vLLM's workers run"
    try:
        settings = load_settings(environ)
    except SettingsError as error:
        yield "vllm-setting", "error", f"{error}; the policy stays off for it", "correct or remove it"
        return
    if settings.receive == OFF:
        yield "vllm-off", "info", "vLLM's receives are left as they are: the policy is off", TURN_ON
        return
    hindrances = [*_hindrances(environ, path), *_stands_aside(environ, release)]
    yield from hindrances
    if not any(severity == "error" for _, severity, _, _ in hindrances):
        yield from _will(environ, settings, release)


def _hindrances(environ: Mapping[str, str], path: Sequence[str]) -> Iterator[Finding]:
    """Say why vLLM's plugin loader would not load the plugin."""
    ours = _distribution(NAME, path)  # of two copies the first alone counts, for the loader as well
    loaded = [entry.value for entry in ours.entry_points if (entry.group, entry.name) == (GROUP, NAME)] if ours else []
    if ours is None:
        means = "nothing will load the policy: the package is importable at most, and has no entry point for vLLM here"
        yield "vllm-plugin-unseen", "error", f"{means}, as where it is on PYTHONPATH alone", INSTALL
    elif loaded != [ENTRY]:
        means = f"nothing will load the policy: metadata of another version is found first (plugin: {loaded or 'none'})"
        yield "vllm-plugin-stale", "error", means, "remove its .egg-info or .dist-info from the path, or install anew"
    listed = environ.get("VLLM_PLUGINS")
    if listed is not None and NAME not in [name.strip() for name in listed.split(",")]:
        means = f"nothing will load the policy: VLLM_PLUGINS={listed!r} does not list {NAME}"
        yield "vllm-plugin-unlisted", "error", means, f"add {NAME} to VLLM_PLUGINS"


def _stands_aside(environ: Mapping[str, str], release: str) -> Iterator[Finding]:
    """Say why the policy, loaded, would leave workers as they are."""
    version = _numbers(release)
    runner = environ.get("VLLM_USE_V2_MODEL_RUNNER", "").strip()
    if runner == "0" or (not runner and version and version < DEFAULT_SINCE):
        means = "workers are left as they are where they run Model Runner V1, which receives in another way"
        yield "vllm-runner", "warning", means, "set VLLM_USE_V2_MODEL_RUNNER=1"
    if environ.get(ITS_VARIABLE, "0").strip() not in ("", "0"):
        means = f"workers are left as they are: {ITS_VARIABLE} has vLLM defer its receives itself"
        yield "vllm-defers-itself", "warning", means, f"keep it, or unset it and use {RECEIVE}"
    if version and version < (0, 33) and environ.get("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "").strip() == "0":
        means = "on Ray workers are left as they are: this executor calls the model runner past the worker"
        yield "vllm-ray", "warning", means, "unset VLLM_USE_RAY_V2_EXECUTOR_BACKEND"


def _will(environ: Mapping[str, str], settings: Settings, release: str) -> Iterator[Finding]:
    """Say what a worker gets that is none of those that are left alone."""
    version = _numbers(release)
    if version and not OLDEST <= version <= NEWEST:
        means = f"vLLM {release} is not one that this was tested on (0.28 to 0.33): its handler's shape will decide"
        yield "vllm-release", "warning", means, "look for `receive policy` in the workers' log"
    if settings.receive == WATCH:
        yield "vllm-on", "info", "receives are left as they are, and stalls are told", "nothing"
        return
    for platform in ("cuda", "rocm"):
        shared = shared_queues(environ, platform)
        if shared and shared.partition("=")[0] in environ:
            means = f"{shared} lets streams share hardware queues: no more is held back than the transport takes"
            yield "vllm-queues", "info", f"{means}, 4 steps without drafts and 2 with them by default", "nothing"
    delay = settings.receive if isinstance(settings.receive, str) else f"a delay of {settings.receive} steps"
    means = f"workers with a pipeline on CUDA or ROCm post receives just in time: {delay}"
    yield "vllm-on", "info", means, "look for `receive policy attached` in the workers' log"


def _distribution(name: str, path: Sequence[str]) -> metadata.Distribution | None:
    """Return the first distribution of this name, or None."""
    return next(iter(metadata.distributions(name=name, path=list(path))), None)


def _numbers(release: str) -> tuple[int, int] | None:
    """Return the first two numbers of a release, or None for what has none."""
    parts = release.split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) > 1 and parts[0].isdigit() and parts[1].isdigit() else None

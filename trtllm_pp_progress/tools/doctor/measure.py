"""Measure instead of looking up: a probe with two ranks on this host, bounded, in the environment of the workers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtllm_pp_progress.settings.core import SWITCH
from trtllm_pp_progress.tools.job.launch import LaunchError, launch
from trtllm_pp_progress.tools.job.role import on_this_host

__all__ = ["measure"]

SIZES = (65536, 1_000_000)  # a sample state as upstream's tests have it, and one with logits
STEP_S = 10.0


def measure(environ: Mapping[str, str], timeout_s: float) -> tuple[dict[str, Any] | None, str | None]:
    """Return what two ranks on this host found: verdict, from how many bytes on sends park, and what carried them.

    Where that cannot be told it is None, and the reason is returned beside it. Takes some seconds, at most `timeout_s`.
    """
    bare = {name: value for name, value in on_this_host(environ).items() if not name.startswith(SWITCH)}
    sizes = ",".join(map(str, SIZES))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe.json"
        arguments = ["-m", "trtllm_pp_progress", "probe", "--transport", "default", "--sizes", sizes, "--no-edge"]
        arguments += ["--step-timeout", str(STEP_S), "--json", str(path)]
        try:
            code = launch(2, "default", arguments, timeout_s, silent=True, environ=bare)
        except LaunchError as error:
            return None, str(error)
        written: dict[str, Any] = {"runs": [], "problem": ""}
        if path.exists():
            written = json.loads(path.read_text(encoding="utf-8"))
    links = [link for run in written["runs"] for link in run["links"] if link.get("rows")]
    if written["problem"] or not links:
        return None, written["problem"] or f"the ranks of a probe ended with exit code {code}"
    (link,) = links
    parked = [row["bytes"] for row in link["rows"] if not row["moves"]]
    verdict = "park" if parked else "move"
    return {"verdict": verdict, "parks_from": min(parked, default=None), "carrier": link["carrier"]}, None

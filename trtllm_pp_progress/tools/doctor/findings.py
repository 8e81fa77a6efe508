"""What the facts mean and what to do about them: every finding, the worst first, and the verdict."""

from __future__ import annotations

from typing import Any

from trtllm_pp_progress.settings.core import PUMP_PERIOD
from trtllm_pp_progress.tools.doctor import on_launcher, on_machine, on_mpi, on_transport, on_upstream
from trtllm_pp_progress.tools.doctor.kinds import SEVERITIES, Finding, kinds_of
from trtllm_pp_progress.tools.doctor.on_transport import where
from trtllm_pp_progress.tools.doctor.on_upstream import pump_off

__all__ = ["EXIT_CODES", "KINDS", "findings", "verdict"]

EXIT_CODES = {"fine": 0, "cured": 0, "affected": 1, "unknown": 2}
KINDS = kinds_of(on_launcher, on_mpi, on_transport, on_upstream, on_machine)
RULES = (
    on_launcher.on_launcher,
    on_mpi.on_mpi,
    on_transport.on_transport,
    on_upstream.on_upstream,
    on_machine.on_machine,
)


def findings(report: dict[str, Any]) -> list[Finding]:
    """Return what is worth knowing, the worst first."""
    found = [finding for rule in RULES for finding in rule(report)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def verdict(report: dict[str, Any], found: list[Finding]) -> tuple[str, str]:
    """Return "fine", "cured", "affected" or "unknown", and why, in a line.

    Nothing is fine or cured where a finding says that a worker may not start, or not as what was looked at.
    """
    word, reason = _by_transport(report)
    doubts = [finding.means for finding in found if finding.kind.doubt]
    if word in ("fine", "cured") and doubts:
        return "unknown", f"{doubts[0]} (else: {word}, {reason})"
    return word, reason


def _by_transport(report: dict[str, Any]) -> tuple[str, str]:
    mpi, upstream, transport = report["mpi"], report["tensorrt_llm"], report["transport"]
    carrier, parks, level = transport["carrier"], transport["parks"], mpi["thread_level"]
    if report["environment"].get("TLLM_DISABLE_MPI") == "1":
        return "unknown", "TLLM_DISABLE_MPI=1: sends go by torch.distributed, which is left as it is"
    if level is None:
        return "unknown", f"MPI is {mpi['state']}: {mpi['error']}"
    if parks == "no":
        return "fine", f"{carrier}: a message moves although its sender is outside MPI ({where(transport)})"
    era = f"TensorRT-LLM's era {upstream['era']}"
    if upstream["patched"] and level != "MULTIPLE":
        return "affected", f"{carrier}: MPI runs with THREAD_{level}, so the relay thread must not drive"
    if upstream["patched"] and pump_off(report):
        return "affected", f"{carrier}: {PUMP_PERIOD} turns the pump of {era} off, and our drive with it"
    if upstream["patched"]:
        return "cured", f"{carrier}: the relay of {era} is patched"
    if upstream["relay_waits"]:
        return "fine", f"{era} waits for its sends: {upstream['reason']}"
    if upstream["action"] == "stand down":
        return "unknown", f"{carrier}: {era} is left as it is: {upstream['reason']}"
    if upstream["state"] not in ("ok", "absent"):
        return "unknown", f"{carrier}: TensorRT-LLM {upstream['state']}: {upstream['error']}"
    if parks == "unknown":
        return "unknown", f"{carrier}: whether it parks large messages was never measured ({where(transport)})"
    if upstream["state"] == "absent":
        return "affected", f"{carrier} parks large messages ({where(transport)}); TensorRT-LLM is not here"
    return "affected", f"{carrier} parks large messages ({where(transport)}), and the relay of {era} is not patched"

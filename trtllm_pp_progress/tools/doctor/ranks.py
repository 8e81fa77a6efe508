"""The reports of a job's ranks in one: who is patched, who is not and why, and what differs. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trtllm_pp_progress.tools.doctor.kinds import SEVERITIES
from trtllm_pp_progress.tools.doctor.on_launcher import SOME_UNPATCHED
from trtllm_pp_progress.tools.job.hosts import listed

__all__ = ["differences", "together"]

WORST_FIRST = ("affected", "unknown", "cured", "fine")
FACTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "package": lambda report: report["package"]["version"],
    "Python": lambda report: report["package"]["python"],
    "native driver": lambda report: "built" if report["package"]["native"] else "not built",
    "TensorRT-LLM": lambda report: report["tensorrt_llm"]["version"] or report["tensorrt_llm"]["state"],
    "era": lambda report: report["tensorrt_llm"]["era"],
    "MPI": lambda report: f"{report['mpi']['vendor'] or '?'} {report['mpi']['version'] or '?'}",
    "libmpi": lambda report: report["mpi"]["libmpi"],
    "mpi4py": lambda report: report["mpi"]["mpi4py"],
    "thread level": lambda report: report["mpi"]["thread_level"],
    "layer": lambda report: report["transport"]["layer"],
    "transports": lambda report: ", ".join(report["transport"]["found"]),
    "UCX": lambda report: (report["transport"]["ucx"] or {}).get("version"),
    "UCX_TLS in force": lambda report: (report["transport"]["ucx"] or {}).get("tls"),
    "UCX_RNDV_THRESH in force": lambda report: (report["transport"]["ucx"] or {}).get("rndv_thresh"),
    "cores": lambda report: report["cores"]["allowed"],
    "quota of cores": lambda report: report["cores"]["quota"],
}


def together(reports: Sequence[dict[str, Any]], hosts: Sequence[str]) -> dict[str, Any]:
    """Return one report out of all ranks' and their hosts, both by rank: the worst one's, its findings everybody's.

    Its reason and findings say of which ranks they hold, where not of all. `ranks` has each rank's host and report,
    `differences` what is not the same on all.
    """
    worst = min(reports, key=lambda report: WORST_FIRST.index(report["verdict"]))
    alike = [rank for rank, report in enumerate(reports) if report["reason"] == worst["reason"]]
    unpatched = _unpatched(reports, hosts)
    return {
        **worst,
        "reason": unpatched or worst["reason"] + _where(alike, hosts),
        "findings": ([SOME_UNPATCHED.found(unpatched=unpatched).written()] if unpatched else [])
        + _findings(reports, hosts),
        "ranks": [
            {"rank": rank, "host": host, "report": report}
            for rank, (host, report) in enumerate(zip(hosts, reports, strict=True))
        ],
        "differences": differences(reports),
    }


def differences(reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each fact and variable that is not the same on all ranks: `what`, and `values`, each with its `ranks`."""
    # A launcher sets PMIX_PREFIX and its like on its own host alone.
    variables = sorted({name for report in reports for name in report["environment"] if not name.endswith("_PREFIX")})
    facts = FACTS | {name: _variable(name) for name in variables}
    found = []
    for what, look in facts.items():
        values: dict[str, list[int]] = {}
        for rank, report in enumerate(reports):
            value = look(report)
            values.setdefault("none" if value is None else str(value), []).append(rank)
        if len(values) > 1:
            by_value = [{"value": value, "ranks": ranks} for value, ranks in values.items()]
            found.append({"what": what, "values": by_value})
    return found


def _variable(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda report: report["environment"].get(name, "not set")


def _where(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    return "" if len(ranks) == len(hosts) else f" (ranks {listed(hosts, ranks)})"


def _unpatched(reports: Sequence[dict[str, Any]], hosts: Sequence[str]) -> str:
    """Return who is not patched, and why, where others are; else nothing."""
    reasons: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        if not report["tensorrt_llm"]["patched"]:
            reasons.setdefault(_why(report), []).append(rank)
    patched = len(reports) - sum(map(len, reasons.values()))
    if not reasons or not patched:
        return ""
    who = "; ".join(f"not ranks {listed(hosts, ranks)}: {why}" for why, ranks in reasons.items())
    return f"{patched} of {len(reports)} ranks are patched, {who}"


def _why(report: dict[str, Any]) -> str:
    package, upstream = report["package"], report["tensorrt_llm"]
    if upstream["state"] == "absent":
        return "TensorRT-LLM is not installed there"
    if upstream["state"] != "ok":
        return f"TensorRT-LLM {upstream['state']}: {upstream['error']}"
    if upstream["action"] == "stand down":
        return str(upstream["reason"])
    if package["problems"]:
        return str(package["problems"][0])
    if package["switch"] is not True:
        return "TRTLLM_PP_PROGRESS is " + ("not set" if package["switch"] is None else "0")
    return "the .pth of this package is not active there" if not package["gate"] else str(upstream["reason"])


def _findings(reports: Sequence[dict[str, Any]], hosts: Sequence[str]) -> list[dict[str, str]]:
    """Return every rank's findings, each once, the worst first, with the ranks that it is true of."""
    ranks: dict[tuple[str, ...], list[int]] = {}
    for rank, report in enumerate(reports):
        for finding in report["findings"]:
            ranks.setdefault(tuple(finding.values()), []).append(rank)
    found = [(*finding[:2], finding[2] + _where(of, hosts), finding[3]) for finding, of in ranks.items()]
    found.sort(key=lambda finding: SEVERITIES.index(finding[1]))
    return [dict(zip(("id", "severity", "means", "do"), finding, strict=True)) for finding in found]

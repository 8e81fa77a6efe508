"""The report for people: one screen."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trtllm_pp_progress.tools.doctor.on_transport import where
from trtllm_pp_progress.tools.job.hosts import listed

__all__ = ["render"]

COLOURS = {"fine": "green", "cured": "green", "affected": "red", "unknown": "yellow"}
SEVERITIES = {"error": "red", "warning": "yellow", "info": "blue"}


def render(report: dict[str, Any], console: Console) -> None:
    """Print the verdict, the facts and the findings."""
    colour = COLOURS[report["verdict"]]
    console.print(f"[bold {colour}]{report['verdict']}[/]: {escape(report['reason'])}\n")
    facts = Table(box=None, show_header=False, pad_edge=False)
    for name, text in _facts(report):
        facts.add_row(f"[bold]{name}[/]", escape(text))
    console.print(facts)
    if report.get("differences"):
        console.print(_differences(report))
    found = Table(box=box.SIMPLE, pad_edge=False, expand=True)
    for column in ("finding", "what it means", "what to do"):
        found.add_column(column, overflow="fold")
    for finding in report["findings"]:
        mark = SEVERITIES[finding["severity"]]
        found.add_row(f"[{mark}]{finding['id']}[/]", escape(finding["means"]), escape(finding["do"]))
    console.print(found)


def _differences(report: dict[str, Any]) -> Table:
    """Return what is not the same on all ranks, a line a value."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in ("ranks differ in", "value", "ranks"):
        table.add_column(column, overflow="fold")
    hosts = [rank["host"] for rank in report["ranks"]]
    for difference in report["differences"]:
        for number, value in enumerate(difference["values"]):
            what = "" if number else difference["what"]
            table.add_row(*map(escape, (what, value["value"], listed(hosts, value["ranks"]))))
    return table


def _facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    package, upstream, mpi = report["package"], report["tensorrt_llm"], report["mpi"]
    transport, cores = report["transport"], report["cores"]
    ucx = transport["ucx"]
    switch = {True: "on", False: "off", None: "not set"}[package["switch"]]
    native = "built" if package["native"] else "not built"
    level = f"THREAD_{mpi['thread_level']}" if mpi["thread_level"] else mpi["state"]
    safety = {True: "thread-safe", False: "not thread-safe", None: "thread safety unknown"}
    quota = "" if cores["quota"] is None else f", quota {cores['quota']:g}"
    facts = [
        ("package", f"{package['version']}, TRTLLM_PP_PROGRESS {switch}, native driver {native}"),
        ("TensorRT-LLM", _upstream(upstream)),
        ("MPI", f"{mpi['vendor'] or '?'} {mpi['version'] or ''}, {level}, mpi4py {mpi['mpi4py'] or '?'}"),
        ("libmpi", mpi["libmpi"] or "?"),
        ("transport", f"{transport['carrier']}; found: {', '.join(transport['found']) or '?'}"),
        ("parks", f"{transport['parks']}: {where(transport)}"),
        ("cores", f"{cores['allowed']} allowed{quota}, {cores['threads']} threads a rank"),
    ]
    if "ranks" in report:
        facts.insert(0, ("ranks", listed([rank["host"] for rank in report["ranks"]])))
    if ucx:
        asked = ", ".join(f"UCX_{name.upper()}={ucx.get(name)}" for name in ("tls", "rndv_thresh", "rndv_scheme"))
        facts.insert(-1, ("UCX", f"{ucx['version']}, {safety[ucx['thread_safe']]}, {asked}"))
    return facts


def _upstream(upstream: dict[str, Any]) -> str:
    if upstream["state"] != "ok":
        return f"{upstream['version'] or ''} {upstream['state']}".strip()
    patched = "patched" if upstream["patched"] else f"not patched, verdict: {upstream['action']}"
    return f"{upstream['version'] or 'of no version'}, era {upstream['era']}, {patched}"

"""Findings about the transport: does it park, how is that known, and do the variables do what they are meant to."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from trtllm_pp_progress.tools.doctor.kinds import Finding, Kind
from trtllm_pp_progress.tools.doctor.on_upstream import TURN_ON

__all__ = ["on_transport", "threshold", "where"]

SIZES = {"": 1, "B": 1, "K": 2**10, "KB": 2**10, "M": 2**20, "MB": 2**20, "G": 2**30, "GB": 2**30}
CURED, LEFT = "nothing more: the relay is patched", "nothing of ours: the relay of this TensorRT-LLM is left as it is"

PARKS = Kind(
    "transport-parks",
    "warning",
    "TCP; shared memory with a rendezvous that needs its sender",
    "{carrier}: a large message {how} ({where})",
    TURN_ON,
)
UNKNOWN = Kind(
    "transport-unknown",
    "warning",
    "InfiniBand, EFA, libfabric: nothing was measured here",
    "{carrier}: whether it parks is not known",
    "measure it between the hosts: {probe}",
)
MEASURED = Kind(
    "measured",
    "info",
    "MPI and a launcher on this host",
    "two ranks on this host, measured: sends {verdict}{edge}, carried by {carrier}; between hosts the table counts",
    "nothing; between hosts: {probe}",
)
NOT_MEASURED = Kind(
    "not-measured",
    "info",
    "no launcher here, a rank of a job, or --no-measure",
    "nothing was measured, a table of transports says what is known: {reason}",
    "{probe}",
)
UNUSED = Kind(
    "ucx-unused",
    "warning",
    "UCX_TLS set where Open MPI sends by ob1 or libfabric",
    "UCX {version} is not in use: messages go by {layer}, UCX_TLS changes nothing",
    "for UCX: --mca pml ucx; without InfiniBand also opal_common_ucx_tls any and opal_common_ucx_devices any",
)
UNSAFE = Kind(
    "ucx-not-thread-safe",
    "warning",
    "a UCX built without --enable-mt",
    "UCX was built without thread support: Open MPI quietly takes another layer under THREAD_MULTIPLE",
    "use a UCX built with --enable-mt",
)
RAISED = Kind(
    "rndv-threshold",
    "info",
    "UCX_RNDV_THRESH raised",
    "UCX_RNDV_THRESH is {text}: raising it hides the stall for messages below it, it does not cure it",
    "leave it at auto once the patch is on",
)
SCHEME = Kind(
    "rndv-scheme",
    "info",
    "UCX_RNDV_SCHEME set, as advised for servers that hang",
    "UCX_RNDV_SCHEME is {scheme}: who copies a large message is set by hand, and with it what parks; {source} here",
    "leave it unset once the patch is on, or measure: {probe}",
)
FORCED = Kind(
    "tcp-forced",
    "warning",
    "a site or an image sets UCX_TLS=tcp",
    "UCX_TLS={tls} keeps UCX to TCP, where large messages park; without it UCX finds {found}",
    "unset UCX_TLS, unless the other transports do not work here",
)
NOT_AVAILABLE = Kind(
    "ucx-not-available",
    "warning",
    "UCX_NET_DEVICES or UCX_TLS of another host, or a device that a container was not given",
    "UCX does without it, by TCP perhaps: {line}",
    "give the container the device (--device=/dev/infiniband and its libraries), or correct the variable",
)
PROVIDER = Kind(
    "provider-other",
    "warning",
    "FI_PROVIDER where libfabric, or that provider, is not what MPI takes (EFA)",
    "FI_PROVIDER={asked} is not in use: messages go by {layer}",
    "for libfabric in Open MPI: --mca pml cm --mca mtl ofi; fi_info -p {asked} shows whether it is here",
)
DENIED = Kind(
    "cma-denied",
    "warning",
    "containers without CAP_SYS_PTRACE, a seccomp profile, Yama, a user namespace for each rank",
    "one process may not read another's memory here ({error}): single copies (CMA) fail, and ranks may end in one",
    "--cap-add=SYS_PTRACE, one namespace for all ranks, or UCX_TLS=^cma and OMPI_MCA_smsc=^cma",
)
COPIES = Kind(
    "ucx-copies",
    "warning",
    "two copies of UCX, as NIXL's wheel brings one",
    "MPI uses {used}; another UCX is {where}: {others}. Two in one process can crash it or take each other's settings",
    "let both use one copy (LD_LIBRARY_PATH, or a NIXL built against the system's UCX)",
)


def on_transport(report: dict[str, Any]) -> Iterator[Finding]:
    """Yield what the transport in use means, and how much of that is measured."""
    transport, known = report["transport"], report["mpi"]["thread_level"]
    if transport["parks"] in ("yes", "sometimes"):
        how = "moves only while its sender is inside MPI" if transport["parks"] == "yes" else "is parked now and then"
        severity, do = _remedy(report)
        yield PARKS.found(severity=severity, do=do, carrier=transport["carrier"], how=how, where=where(transport))
    elif transport["parks"] == "unknown" and known:
        yield UNKNOWN.found(carrier=transport["carrier"], probe=_probe(report))
    if measured := transport["measured"]:
        edge = f" from {measured['parks_from']:,} bytes on" if measured["parks_from"] else ""
        yield MEASURED.found(verdict=measured["verdict"], edge=edge, carrier=measured["carrier"], probe=_probe(report))
    elif known:
        yield NOT_MEASURED.found(reason=transport["not_measured"], probe=_probe(report))
    ucx = transport["ucx"] or {}
    if transport["layer"] not in (None, "pml ucx", "netmod ucx") and "UCX_TLS" in report["environment"]:
        yield UNUSED.found(version=ucx.get("version", ""), layer=transport["layer"])
    yield from _on_provider(report)
    yield from _on_ucx(report, ucx)


def where(transport: dict[str, Any]) -> str:
    """Return in words where large messages park, and how that is known."""
    source = "measured" if transport["measured"] else "by the table"
    words = {"yes": "they park", "sometimes": "they may park", "no": "they move", "unknown": "nothing is known"}
    here, there = transport["parks_within_node"], transport["parks_between_nodes"]
    parts = [f"within a host {words[here]}, {source}"] if here else []
    parts += [f"between hosts {words[there]}, by the table"] if there else []
    return "; ".join(parts) or "nothing is known of it"


def threshold(text: str) -> dict[str, float | None]:
    """Return bytes by scope out of a form of UCX_RNDV_THRESH: None for auto, infinity for inf; ValueError for no form.

    Forms: auto, inf, 0, 8192, 8k, 8KB, intra:auto,inter:64k.
    """
    values: dict[str, float | None] = {}
    for part in text.strip().split(","):
        scope, _, size = part.rpartition(":")
        match = re.fullmatch(r"(\d+)\s*([KMG]?B?)", size.strip().upper())
        if size.strip().lower() == "auto":
            values[scope or "all"] = None
        elif size.strip().lower() == "inf":
            values[scope or "all"] = math.inf
        elif match:
            values[scope or "all"] = float(match[1]) * SIZES[match[2]]
        else:
            raise ValueError(f"{text!r} is no size: valid ones are like auto, inf, 0, 8192, 8k, intra:auto,inter:64k")
    return values


def _on_provider(report: dict[str, Any]) -> Iterator[Finding]:
    transport, asked = report["transport"], report["environment"].get("FI_PROVIDER", "")
    layer, provider = transport["layer"], transport["provider"]
    names = asked.replace(";", ",").split(",")
    if not asked or asked.startswith("^") or layer is None or (provider and provider.split(";")[0] in names):
        return
    if provider is not None:
        yield PROVIDER.found(asked=asked, layer=f"{layer} over {provider}")
    elif not re.search("ofi|cm", layer):
        yield PROVIDER.found(asked=asked, layer=layer)


def _on_ucx(report: dict[str, Any], ucx: dict[str, Any]) -> Iterator[Finding]:
    if "ucx-not-thread-safe" in report["mpi"]["messages"] or ucx.get("thread_safe") is False:
        yield UNSAFE.found()
    if "ucx-not-available" in report["mpi"]["lines"]:
        yield NOT_AVAILABLE.found(line=report["mpi"]["lines"]["ucx-not-available"])
    if report["surroundings"]["single_copy"] not in ("works", None):
        yield DENIED.found(error=report["surroundings"]["single_copy"])
    environment = report["environment"]
    text = ucx.get("rndv_thresh") or environment.get("UCX_RNDV_THRESH") or "auto"
    try:
        raised = [size for size in threshold(text).values() if size is not None]
    except ValueError as error:
        yield Finding(RAISED, "error", f"UCX_RNDV_THRESH: {error}", "correct it")
    else:
        if raised:
            yield RAISED.found(text=text)
    scheme = ucx.get("rndv_scheme") or environment.get("UCX_RNDV_SCHEME") or "auto"
    if scheme != "auto":
        yield SCHEME.found(scheme=scheme, source=report["transport"]["source"], probe=_probe(report))
    found, without = set(ucx.get("found") or ()), set(ucx.get("found_without_tls") or ())
    if without - found and "tcp" in found and found <= {"tcp", "self"}:
        yield FORCED.found(tls=ucx["tls"], found=", ".join(sorted(without - {"self"})))
    for where in ("loaded", "installed"):
        if others := ucx.get(f"others_{where}"):
            yield COPIES.found(used=ucx["library"], where=where, others=", ".join(others))


def _remedy(report: dict[str, Any]) -> tuple[str, str]:
    """Return how grave a transport that parks is for this TensorRT-LLM, and what to do about it."""
    upstream = report["tensorrt_llm"]
    if upstream["patched"]:
        return "info", CURED
    if upstream["action"] == "stand down":
        return "info", LEFT
    return "warning", TURN_ON


def _probe(report: dict[str, Any]) -> str:
    """Return how to measure under the launcher that is there; not what was just done."""
    launcher = report["launcher"]
    start = "srun --mpi=pmix -N 2 -n 2" if "srun" in (launcher["name"] or "") else "mpirun -n 2 --host A,B"
    return f"{start} trtllm-pp-progress probe"

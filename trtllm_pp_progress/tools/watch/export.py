"""`export`: Prometheus metrics of every patched process of this host, without code in any of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import click

from trtllm_pp_progress.telemetry import ProcessStatus, StatusCollector
from trtllm_pp_progress.tools.watch.readings import read

__all__ = ["processes", "serve"]


def processes() -> Iterator[ProcessStatus]:
    """Yield what every process says, with the labels that tell it apart."""
    for pid, said in read().said.items():
        yield ProcessStatus({"pid": str(pid)}, said.get("tensorrt_llm", {}), said.get("vllm", {}))


def serve(port: int, address: str) -> None:
    """Serve metrics until interrupted; click.ClickException where prometheus_client is missing or the port is taken."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise click.ClickException("no prometheus_client: pip install prometheus-client") from None
    registry: Any = CollectorRegistry()  # our own: PROMETHEUS_MULTIPROC_DIR of the engine does not touch it
    registry.register(StatusCollector(processes))
    try:
        start_http_server(port, address, registry)
    except OSError as error:
        raise click.ClickException(f"port {port} of {address or 'every address'}: {error.strerror}") from None
    click.echo(f"metrics on port {port}", err=True)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        return

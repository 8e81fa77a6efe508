"""What the door of a process answers for this patch: its status, and driving turned off and on."""

from __future__ import annotations

import threading
from typing import Any

from trtllm_pp_progress.installation.install import status
from trtllm_pp_progress.installation.records import INSTALLED
from trtllm_pp_progress.pyexecutor.attachment import attachment_of
from trtllm_pp_progress.pyexecutor.shape import Action
from trtllm_pp_progress.settings.schema import number

__all__ = ["ORDERS", "answer", "turn"]

ORDERS = ("status", "off", "on")
LEASE = number(float, 0.1, 600)  # seconds; then driving is on again, whatever became of who turned it off

_changing = threading.Lock()
_leases: list[threading.Timer] = []


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Carry out a request, {"order": one of ORDERS, "lease_s": ...}; raises ValueError for any other."""
    order = request.get("order", "status")
    if order not in ORDERS:
        raise ValueError(f"order {order!r} is not valid: one of {', '.join(ORDERS)}")
    if order == "status":
        return status()
    return turn(order == "on", LEASE(request.get("lease_s", 10)) if order == "off" else 0.0)


def turn(on: bool, lease_s: float) -> dict[str, Any]:
    """Turn driving on, or off for `lease_s` seconds; return how many executors that reached, and why others refused.

    Only where the relay thread relays: elsewhere a drain before a forward relies on sends being driven.
    """
    turned, refused = 0, []
    with _changing:
        for timer in _leases:
            timer.cancel()
        _leases.clear()
        for record in list(INSTALLED.values()):
            for executor in list(record.executors):
                attachment = attachment_of(executor)
                if attachment is None:
                    continue
                verdict = attachment.verdict(executor)
                if not on and verdict.action is not Action.PATCH:
                    refused.append(f"era {verdict.era}, {verdict.action.value}: a drain relies on sends being driven")
                    continue
                attachment.engine.turn(on)
                turned += 1
        if not on and turned:
            timer = threading.Timer(lease_s, turn, (True, 0.0))
            timer.daemon = True
            timer.start()
            _leases.append(timer)
    return {"turned": turned, "refused": refused}

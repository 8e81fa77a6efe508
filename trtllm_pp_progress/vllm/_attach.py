"""Between one vLLM worker and its receive policy: when to start, when to flush, when to report."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from trtllm_pp_progress.vllm import _gates
from trtllm_pp_progress.vllm._adapter import Receiver
from trtllm_pp_progress.vllm._gates import Facts, ReceiveRefused
from trtllm_pp_progress.vllm._settings import ReceiveSettings
from trtllm_pp_progress.vllm._shadow import Shadows
from trtllm_pp_progress.vllm._source import Source
from trtllm_pp_progress.vllm._stats import StreamTimer
from trtllm_pp_progress.vllm._watch import StallWatch

__all__ = ["Attachment", "attachments"]

logger = logging.getLogger("vllm.trtllm_pp_progress")

# What a worker is asked to do between steps. Before each of these the device is expected to be at rest, or
# communicators, memory or graphs change under it: nothing may be held back then. Names that a release lacks are passed
# over.
BOUNDARIES = (
    "sleep", "wake_up", "discard", "checkpoint_prepare", "checkpoint_restore", "synchronize_device", "reload_weights",
    "reset_weights", "start_weight_update", "start_draft_weight_update", "update_weights", "execute_dummy_batch",
    "elastic_ep_execute", "handle_ft_command",
)  # fmt: skip

attachments: weakref.WeakSet[Attachment] = weakref.WeakSet()


class Attachment:
    """The receive policy of one worker.

    Made after `init_device` and before `compile_or_warm_up_model`, whose return starts the policy. Raises
    ReceiveRefused where the policy does not apply, and SettingsError for a delay that pp_size does not allow.
    """

    worker: Any

    def __init__(self, worker: Any, settings: ReceiveSettings) -> None:
        if any(other.worker is worker for other in attachments):
            raise ReceiveRefused("the worker has a receive policy already")
        try:
            facts = _gates.observe(worker)
        except (AttributeError, ImportError, AssertionError) as error:
            raise ReceiveRefused(f"this vLLM release is not known: {error}") from error
        # The operator's mistakes come before the worker's peculiarities, on every rank alike.
        delay = settings.delay(facts.rank, facts.pp_size) if facts.pp_size > 1 else 0
        if reason := _gates.refusal(facts):
            raise ReceiveRefused(reason)
        timer = StreamTimer(_timing_event) if settings.timing == "on" else None
        handler = worker.model_runner.pp_handler
        self.facts: Facts = facts
        self.settings = settings
        self.policy: Receiver | Source
        if handler.is_last_rank:
            self.policy = Source(handler, timer)
        else:
            self.policy = Receiver(handler, delay, timer)
        self.worker = worker
        self.steps = 0
        self._watch = StallWatch(self._busy, lambda: self.steps, self._stalled, settings.stall_warning_s)
        self._shadows = Shadows(worker)
        self._shadows.place("compile_or_warm_up_model", self._after_warm_up)
        self._shadows.place("execute_model", self._around_step)
        self._shadows.place("shutdown", self._at_shutdown)
        for name in BOUNDARIES:
            self._shadows.place(name, partial(self._flush_before, name))
        attachments.add(self)
        logger.info("receive policy attached: %s", json.dumps(self.status()))

    def detach(self) -> None:
        """Post everything and give the worker and its handler their own methods back."""
        self._watch.stop()
        self.policy.deactivate("detach")
        self._shadows.remove()
        attachments.discard(self)

    def status(self) -> dict[str, Any]:
        """Return settings, role and counters, in plain values."""
        receiver = self.policy if isinstance(self.policy, Receiver) else None
        return {
            "rank": self.facts.rank,
            "pp_size": self.facts.pp_size,
            "role": "receiver" if receiver else "source",
            "active": self.policy.active,
            "trouble": self.policy.trouble,
            "delay": receiver.delay if receiver else None,
            "settings": asdict(self.settings),
            "steps": self.steps,
            "stalls": self._watch.stalls,
            "stalled_s": round(self._watch.stalled_s(), 3),
            "counters": self.policy.counters(),
        }

    def _after_warm_up(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def compile_or_warm_up_model(*args: Any, **kwargs: Any) -> Any:
            # A pending receive can block the load of a kernel's first use, and graphs are captured here.
            self._watch.stop()
            self.policy.deactivate("warm_up")
            answer = stock(*args, **kwargs)
            self.policy.activate()
            self._watch.start()
            return answer

        return compile_or_warm_up_model

    def _around_step(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self.steps += 1
            answer = stock(scheduler_output, *args, **kwargs)
            # The last word of the engine before it falls silent is an empty step that finishes the last request.
            empty = not scheduler_output.total_num_scheduled_tokens
            if empty and not self.worker.model_runner.req_states.req_id_to_index:
                self.policy.flush("idle")
            return answer

        return execute_model

    def _flush_before(self, name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        def boundary(*args: Any, **kwargs: Any) -> Any:
            self.policy.flush(name)
            return stock(*args, **kwargs)

        return boundary

    def _at_shutdown(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def shutdown(*args: Any, **kwargs: Any) -> Any:
            self._watch.stop()
            try:
                self.policy.deactivate("shutdown")
            except Exception as error:  # a dead peer or communicator must not keep the worker from going
                logger.warning("receives left unposted at shutdown: %s", error)
            logger.info("receive policy at shutdown: %s", json.dumps(self.status()))
            return stock(*args, **kwargs)

        return shutdown

    def _busy(self) -> bool:
        stream = self.policy.handler.broadcast_stream
        device = getattr(stream, "device", None)
        if device is not None:
            torch.cuda.set_device(device)  # of the watching thread, which would else open a context on the first GPU
        return not stream.query()

    def _stalled(self, seconds: float, over: bool) -> None:
        """Log a stall with everything that says where to look."""
        source = self.facts.pp_size - 1
        where = f"pipeline rank {self.facts.rank} of {self.facts.pp_size}, step {self.steps}"
        if over:
            logger.warning("%s: sampled-result broadcasts went on after %.1f s", where, seconds)
            return
        peers = f"rank {source} to send it" if self.facts.rank != source else "the other ranks to receive it"
        text = "%s: a sampled-result broadcast has been under way for %.1f s and no step has begun: it waits for %s"
        logger.warning(text, where, seconds, peers)


def _timing_event() -> Any:
    make: Any = torch.cuda.Event  # torch leaves it untyped
    return make(enable_timing=True)

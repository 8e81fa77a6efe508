"""Between one vLLM worker and its receive policy: when to start, when to flush, when to report."""

from __future__ import annotations

import inspect
import json
import logging
import weakref
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from trtllm_pp_progress.patching.patch import IncompatibleError
from trtllm_pp_progress.patching.shadow import Shadows
from trtllm_pp_progress.vllm import shape
from trtllm_pp_progress.vllm.receiver import Receiver
from trtllm_pp_progress.vllm.settings import WATCH, Settings, transport_here
from trtllm_pp_progress.vllm.shape import Facts
from trtllm_pp_progress.vllm.source import Source, Watched
from trtllm_pp_progress.vllm.stall_watch import StallWatch
from trtllm_pp_progress.vllm.timer import StreamTimer
from trtllm_pp_progress.vllm.transport import Transport

__all__ = ["Attachment", "attachments", "boundaries"]

logger = logging.getLogger("vllm.trtllm_pp_progress")

# Methods of a worker that are part of a step, or that ask nothing of the GPU. Before every other one the device is
# expected to be at rest, or communicators, memory or graphs may change under it: nothing may be held back then.
WITHIN_A_STEP = ("execute_model", "sample_tokens", "take_draft_token_ids", "annotate_profile")

attachments: weakref.WeakSet[Attachment] = weakref.WeakSet()


class Attachment:
    """The receive policy of one worker.

    Made after `init_device` and before `compile_or_warm_up_model`, whose return starts the policy. Raises
    IncompatibleError where the policy does not apply, and SettingsError for a delay that pp_size does not allow.
    """

    worker: Any

    def __init__(self, worker: Any, settings: Settings) -> None:
        if any(other.worker is worker for other in attachments):
            raise IncompatibleError("the worker has a receive policy already")
        try:
            facts = shape.observe(worker)
        except (AttributeError, ImportError, AssertionError) as error:
            raise IncompatibleError(f"this vLLM release is not known: {error}") from error
        self.facts: Facts = facts
        self.settings = settings
        self.transport: Transport | None = None
        self.policy = self._policy(worker.model_runner.pp_handler)
        self.worker = worker
        self.steps = 0
        self._watch = StallWatch(
            self._under_way, lambda: self.steps, self._stalled, settings.stall_warning_s, quiet=self._quiet
        )
        self._shadows = Shadows(worker)
        self._shadows.place("compile_or_warm_up_model", self._after_warm_up)
        self._shadows.place("execute_model", self._around_step)
        self._shadows.place("shutdown", self._at_shutdown)
        for name in boundaries(worker):
            self._shadows.place(name, partial(self._flush_before, name))
        attachments.add(self)
        logger.info("receive policy attached: %s", json.dumps(self.status()))

    def _policy(self, handler: Any) -> Receiver | Watched:
        """Return what this rank does; raises where it is not to do it."""
        facts, settings = self.facts, self.settings
        if settings.receive == WATCH:
            if reason := shape.unwatchable(facts) or shape.unseen_streams(handler):
                raise IncompatibleError(reason)
            return Watched(handler)
        # The operator's mistakes come before the worker's peculiarities, on every rank alike.
        wanted = settings.delay(facts.rank, facts.pp_size) if facts.pp_size > 1 else 0
        if reason := shape.refusal(facts):
            raise IncompatibleError(reason)
        self.transport = transport = transport_here(facts.platform, facts.per_step, facts.message_bytes)
        if reason := shape.nothing_taken(facts, transport):
            raise IncompatibleError(reason)
        timer = StreamTimer(_timing_event) if settings.timing == "on" else None
        if handler.is_last_rank:
            return Source(handler, timer)
        longest = transport.longest_delay(facts.rank, facts.pp_size)
        if wanted > longest:
            text = (
                "pipeline rank %d holds receives back for %d steps, not %d: NCCL takes %d broadcasts without a receiver"
            )
            logger.warning(text, facts.rank, longest, wanted, transport.ahead)
        return Receiver(handler, min(wanted, longest), timer)

    def detach(self) -> None:
        """Post everything and give the worker and its handler their own methods back."""
        self._watch.stop()
        self.policy.deactivate("detach")
        self._shadows.remove()
        attachments.discard(self)

    def status(self) -> dict[str, Any]:
        """Return settings, role and counters, in plain values."""
        return {
            "rank": self.facts.rank,
            "pp_size": self.facts.pp_size,
            "role": "source" if self.policy.handler.is_last_rank else "receiver",
            "active": self.policy.active,
            "trouble": self.policy.trouble,
            "delay": self.policy.delay,
            "held": self.policy.held,
            "transport": asdict(self.transport) if self.transport else None,
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
        transport, delay = self.transport, self.policy.delay or 0
        beyond = transport is not None and delay > transport.steps  # what is held may be more than is taken

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self.steps += 1
            answer = stock(scheduler_output, *args, **kwargs)
            # The last word of the engine before it falls silent is an empty step that says which requests have ended.
            # Some may live on without anything to run, as a session that waits for its next input does.
            if not scheduler_output.total_num_scheduled_tokens:
                live = self.worker.model_runner.req_states.req_id_to_index
                if getattr(scheduler_output, "finished_req_ids", None) or not live:
                    self.policy.flush("idle")
                else:
                    self.policy.end_empty_step()
            # The engine waits for a result before it goes on with this step, and maybe for one that waits for us.
            elif beyond and getattr(scheduler_output, "pending_structured_output_tokens", False):
                self.policy.flush("deferred", keep=transport.steps)  # type: ignore[union-attr]
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

    def _quiet(self) -> None:
        """Let go of everything where no step begins and this rank has nothing to do that it could hinder."""
        if self.policy.held and not _busy(self.policy.handler.main_stream):
            self.policy.flush("quiet", patience_s=self.settings.stall_warning_s / 8)

    def _under_way(self) -> bool:
        """Whether something is waited for that no step of this rank would bring on."""
        return self.policy.held > 0 or _busy(self.policy.handler.broadcast_stream)

    def _stalled(self, seconds: float, over: bool) -> None:
        """Let go of everything, and log a stall with all that says where to look."""
        source, handler = self.facts.pp_size - 1, self.policy.handler
        where = f"pipeline rank {self.facts.rank} of {self.facts.pp_size}, step {self.steps}"
        if over:
            logger.warning("%s: sampled-result broadcasts went on after %.1f s", where, seconds)
            return
        own = "has not ended" if _busy(handler.main_stream) else "has ended"
        if self.policy.held and isinstance(self.policy, Receiver):
            what = self._let_go(self.policy, f"no step began for {seconds:.1f} s after step {self.steps}")
            text = "%s: no step has begun for %.1f s while receives were held back: %s; this rank's own model work %s"
            logger.warning(text, where, seconds, what, own)
            return
        peers = f"rank {source} to send it" if self.facts.rank != source else "the other ranks to receive it"
        text = "%s: a sampled-result broadcast has been under way for %.1f s and no step has begun: it waits for %s"
        logger.warning(text + "; this rank's own model work %s", where, seconds, peers, own)

    def _let_go(self, receiver: Receiver, why: str) -> str:
        """Post everything that is held back, for good, and return in words what came of it."""
        try:
            posted = receiver.give_up(why, self.settings.stall_warning_s / 8)
        except Exception as error:  # of a communicator in error, which vLLM will say more about
            return f"posting them failed ({error!r})"
        if posted < 0:
            return "they cannot be posted now, for the step is in the middle of its own"
        return f"{posted} are posted now, and none is held back from now on"


def boundaries(worker: Any) -> list[str]:
    """Return the names of a worker's public methods, an extension's included, before which nothing may be held back."""
    names = [name for name in dir(worker) if not name.startswith("_") and name not in WITHIN_A_STEP]
    return [name for name in names if inspect.isroutine(inspect.getattr_static(worker, name))]


def _busy(stream: Any) -> bool:
    """Ask a stream, from whatever thread, whether work is left on it."""
    device = getattr(stream, "device", None)
    if device is not None:
        torch.cuda.set_device(device)  # of the asking thread, which would else open a context on the first GPU
    return not stream.query()


def _timing_event() -> Any:
    make: Any = torch.cuda.Event  # torch leaves it untyped
    return make(enable_timing=True)

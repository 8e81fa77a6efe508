"""Whether a worker is one that the receive policy understands; if not, why not. Looks, changes nothing."""

from __future__ import annotations

import inspect
from collections import deque
from dataclasses import dataclass
from typing import Any

from trtllm_pp_progress.vllm.transport import Transport

__all__ = [
    "HANDLER",
    "ITS_VARIABLE",
    "RUNNER",
    "Facts",
    "nothing_taken",
    "observe",
    "refusal",
    "steps_past_worker",
    "unknown_shape",
    "unseen_streams",
    "unwatchable",
]

RUNNER = "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
HANDLER = "vllm.v1.worker.gpu.pp_utils.PPHandler"
PLATFORMS = ("cuda", "rocm")
BACKEND = "nccl"  # RCCL's name in torch too; returns to the host at once
ATTRIBUTES = ("is_last_rank", "queue", "main_stream", "broadcast_stream", "broadcast_group")
METHODS = ("receive", "broadcast", "get_prev_sampled_outputs", "on_req_idx_freed")


# What the handler of vllm-project/vllm#53948 has, which defers receives by itself, and the variable that has it do so.
DEFERS_ITSELF = ("enable_deferred_collectives", "requested_recv_launch_delay", "flush_pending_collectives")
ITS_VARIABLE = "VLLM_PP_DEFER_SAMPLED_TOKEN_RECV"


@dataclass(frozen=True)
class Facts:
    """What decides whether the policy applies to a worker, and how long a receive may be held back there."""

    pp_size: int
    rank: int  # in the pipeline
    platform: str
    runner: str
    pooling: bool
    handler: str
    backend: str
    unknown_shape: str  # the first thing about the handler that is not as known, or nothing
    defers_itself: bool = False
    per_step: int = 2  # broadcasts of a step, at most
    message_bytes: int = 2048  # of the largest


def observe(worker: Any) -> Facts:
    """Look at a vLLM worker whose device is initialised; raises AttributeError where it is shaped like none known."""
    import torch.distributed
    from vllm.distributed.parallel_state import get_pp_group
    from vllm.platforms import current_platform

    config, runner = worker.vllm_config, worker.model_runner
    handler = getattr(runner, "pp_handler", None)
    group = getattr(handler, "broadcast_group", None)
    drafts = getattr(handler, "max_sample_len", 1) - 1
    return Facts(
        pp_size=config.parallel_config.pipeline_parallel_size,
        rank=get_pp_group().rank_in_group,
        platform="rocm" if current_platform.is_rocm() else current_platform.device_type or "unknown",
        runner=_name(runner),
        pooling=bool(runner.is_pooling_model),
        handler=_name(handler),
        backend="none" if group is None else torch.distributed.get_backend(group),
        unknown_shape=unknown_shape(worker, config.parallel_config.pipeline_parallel_size),
        defers_itself=any(hasattr(handler, name) for name in DEFERS_ITSELF),
        per_step=2 + bool(drafts and hasattr(handler, "broadcast_drafts")),
        message_bytes=8 * config.scheduler_config.max_num_seqs * (1 + drafts),
    )


def refusal(facts: Facts) -> str | None:
    """Return why the policy does not apply, or None where it does."""
    if reason := unwatchable(facts):
        return reason
    if facts.runner != RUNNER:
        return f"model runner is {facts.runner}: only Model Runner V2 itself is known ({RUNNER})"
    if facts.pooling:
        return "the model is a pooling model: nothing is sampled"
    if facts.handler != HANDLER:
        return f"pipeline handler is {facts.handler}: only {HANDLER} is known"
    if facts.defers_itself:
        return f"this vLLM defers receives itself: set {ITS_VARIABLE} to a delay in steps instead"
    if facts.backend != BACKEND:
        return f"broadcast backend is {facts.backend}: it would block the source's host until a receive is posted"
    if facts.unknown_shape:
        return f"this vLLM release is not known: {facts.unknown_shape}"
    return None


def unwatchable(facts: Facts) -> str | None:
    """Return why a worker's broadcasts cannot even be watched, or None where they can."""
    if facts.pp_size < 2:
        return f"pipeline parallel size is {facts.pp_size}: there is no receive to defer"
    if facts.platform not in PLATFORMS:
        return f"platform is {facts.platform}: only {' and '.join(PLATFORMS)} order a receive by streams"
    return None


def unseen_streams(handler: Any) -> str | None:
    """Return why there is no broadcast stream to look at, or None where there is one."""
    missing = [name for name in ("is_last_rank", "main_stream", "broadcast_stream") if not hasattr(handler, name)]
    return f"pipeline handler is {_name(handler)}: it has no {missing[0]}" if missing else None


def nothing_taken(facts: Facts, sent: Transport) -> str | None:
    """Return why not even one step may be held back, or None where some may."""
    if sent.longest_delay(facts.pp_size - 2, facts.pp_size):
        return None
    return (
        f"{sent.shared} lets streams share hardware queues, and NCCL takes {sent.ahead} broadcasts of up to "
        f"{facts.message_bytes} bytes without a receiver, less than a step's {facts.per_step}: the last rank would "
        "wait, and its model behind it"
    )


def steps_past_worker(wrapper: Any) -> str | None:
    """Return why a worker's steps are not seen, or None where its wrapper hands each one to the worker."""
    if callable(getattr(type(wrapper), "execute_model_ray", None)):  # to 0.32, with VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0
        return "this Ray executor calls the model runner past the worker: steps and silences would not be seen"
    return None


def unknown_shape(worker: Any, pp_size: int) -> str:
    """Return the first thing about a worker's handler that the adapter counts on and does not find, or nothing."""
    handler: Any = getattr(worker.model_runner, "pp_handler", None)
    missing = [name for name in ATTRIBUTES if not hasattr(handler, name)]
    missing += [name for name in METHODS if not callable(getattr(handler, name, None))]
    if missing:
        return f"the handler has no {missing[0]}"
    if not isinstance(handler.queue, deque):
        return f"the handler's queue is a {type(handler.queue).__name__}, not a deque"
    if not handler.is_last_rank and len(handler.queue) != pp_size:
        return f"the handler's queue holds {len(handler.queue)} steps, not pp_size={pp_size}"
    words = _words(handler.receive)
    if "broadcast" not in words:
        return "the handler's receive calls no broadcast"
    if "async_op" in words:
        return "the handler's receive uses the work objects of its broadcasts"
    if "event" not in _words(handler.get_prev_sampled_outputs):
        return "the handler consumes a slot without its event"
    if not hasattr(getattr(worker.model_runner, "req_states", None), "req_id_to_index"):
        return "the model runner does not say which requests live"
    return ""


def _words(function: Any) -> set[str]:
    """Return the names and keywords that a method's code uses; nothing for one without Python code."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return set()
    words = set(code.co_names)
    for constant in code.co_consts:
        words |= {word for word in constant if isinstance(word, str)} if isinstance(constant, tuple) else set()
    return words


def _name(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"

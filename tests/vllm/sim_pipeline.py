"""A pipeline of simulated GPUs around vLLM's real PPHandler and the real policy: one process, no time, any order.

Hosts, devices and the engine take turns by a seed. A host that waits, for a kernel to be loaded, lets the others go on;
when nobody can go on any more the run hangs, which is what the tests look for. Every value depends on the values fed
back before, as in pp_world.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from pp_engine import Load, Step, batch_of, plan
from sim_device import MANY, ONE, Broadcasts, Device, Event, Link, Stream

VOCABULARY = 50_021
SLOTS = 16
FILLED = {torch.int64: np.int64, torch.int32: np.int32}


@dataclass(frozen=True)
class World:
    """One run: who is simulated, and what the ranks are told about it."""

    pp_size: int
    seed: int = 1
    queues: str = ONE
    limit: int = 8  # broadcasts that the transport takes without a receiver
    drafts: int = 0
    loaded: bool = False  # hosts get a turn now and then
    load: Load = field(default_factory=lambda: Load(steps=60, requests=12, arrivals=0.8))
    depth: int = 0  # steps under way at most; 0: pp_size + 1, as with asynchronous scheduling
    receive: Any = None  # the policy's setting; None: stock vLLM
    shipped: bool = True  # whether a policy knows of the limit and the queues
    pp_utils: str = ""  # another release's file
    frees: bool = False  # whether a host that waits in the middle of a step waits for its whole device
    told: bool = True  # whether the workers hear of a pause
    patience: int = 0  # how often the stall watch of every rank may look when nobody can go on

    @property
    def stock(self) -> World:
        return replace(self, receive=None)


class Hang(AssertionError):
    """Nobody can go on; says what each device and host stands at."""


class _Abandoned(BaseException):
    """Ends the thread of a host whose run is over."""


@dataclass
class Outcome:
    """What a run came to."""

    sampled: list[Any] = field(default_factory=list)
    consumed: list[list[Any]] = field(default_factory=list)
    mismatched: int = 0
    delays: list[int | None] = field(default_factory=list)
    statuses: list[dict[str, Any]] = field(default_factory=list)


def run(world: World) -> Outcome:
    """Run a world to its end; Hang if it has none."""
    return _Run(world).run()


def hangs(world: World) -> bool:
    """Whether a world comes to a standstill."""
    try:
        run(world)
    except Hang:
        return True
    return False


class _Run:
    def __init__(self, world: World) -> None:
        self.world = world
        self.dice = random.Random(world.seed)
        self.steps = plan(world.seed, world.pp_size, replace(world.load, drafts=world.drafts))
        size = world.pp_size
        self.broadcasts = Broadcasts(list(range(size - 1)), world.limit)
        self.links = [Link() for _ in range(size - 1)]
        self.results: dict[int, bool] = {}  # by step: whether the engine has the result
        self.outcome = Outcome(consumed=[[] for _ in range(size)])
        self.now: _Rank | None = None
        _module(world.pp_utils)  # while torch is itself
        with self._fakes():
            self.ranks = [_Rank(self, number) for number in range(size)]

    def run(self) -> Outcome:
        engine = _Engine(self)
        with self._fakes():
            try:
                self._turns(engine)
            finally:
                for rank in self.ranks:
                    rank.end()
        self.outcome.sampled = self.ranks[-1].sampled
        return self.outcome

    def _turns(self, engine: _Engine) -> None:
        looks = self.world.patience
        while True:
            moves: list[Callable[[], bool]] = [engine.advance]
            moves += [rank.device.advance for rank in self.ranks]
            hosts = [rank.advance for rank in self.ranks]
            if not self.world.loaded or self.dice.random() < 0.3:
                moves += hosts
            self.dice.shuffle(moves)
            for rank in self.ranks:
                rank.device.start()
            if any([self._move(move) for move in moves]):
                continue
            if any([self._move(move) for move in hosts]):
                continue
            if engine.over and not any(rank.busy for rank in self.ranks):
                return
            if looks and any([rank.look() for rank in self.ranks]):
                looks -= 1
                continue
            where = [f"rank {r.number}: {r.state}, device at {r.device.stuck()}" for r in self.ranks]
            raise Hang("; ".join([f"engine at step {engine.next}", *where]))

    def _move(self, move: Callable[[], bool]) -> bool:
        return move()

    @contextmanager
    def _fakes(self) -> Iterator[None]:
        """Let torch's streams, events and broadcasts be those of the rank whose host runs."""
        with (
            mock.patch.multiple(
                torch.cuda,
                Stream=lambda device=None, priority=0: Stream(self.now.device),
                Event=Event,
                current_stream=lambda device=None: self.now.device.current,
                stream=lambda stream: self.now.device.use(stream),
            ),
            mock.patch.object(torch.Tensor, "record_stream"),
            mock.patch.object(
                torch.distributed, "broadcast", lambda tensor, src=None, group=None: self.now.broadcast(tensor)
            ),
        ):
            yield


class _Engine:
    """Issues the plan's steps, with so many under way at most, and waits for results as vLLM's does."""

    def __init__(self, run: _Run) -> None:
        self.run, self.next = run, 0
        self.under_way: deque[int] = deque()
        self.depth = run.world.depth or run.world.pp_size + 1
        self.deferred: int | None = None
        self.paused = -1  # the step before which a pause was told

    @property
    def over(self) -> bool:
        return self.next == len(self.run.steps) and not self.under_way and self.deferred is None

    def advance(self) -> bool:
        steps = self.run.steps
        while self.under_way and not steps[self.under_way[0]].rows:
            self.under_way.popleft()  # an empty step has no result to wait for
        step = steps[self.next] if self.next < len(steps) else None
        full = len(self.under_way) >= self.depth
        if step is not None and step.drain and self.paused != self.next and self.run.world.told:
            self.paused = self.next
            for rank in self.run.ranks:
                rank.call("check_health", self.next)
            return True
        if step is None or full or self.deferred is not None or ((step.drain or self._silent()) and self.under_way):
            return self._take()
        for rank in self.run.ranks:
            rank.call("execute_model", self.next)
        if step.rows and step.deferred and self.under_way:
            self.deferred = self.next
        else:
            self._sample(self.next)
        self.next += 1
        return True

    def _silent(self) -> bool:
        return self.next > 0 and self.run.steps[self.next - 1].silence

    def _sample(self, number: int) -> None:
        if self.run.steps[number].rows:
            for rank in self.run.ranks:
                rank.call("sample_tokens", number)
        self.under_way.append(number)

    def _take(self) -> bool:
        """Take the oldest result, if it is there."""
        if not self.under_way and self.deferred is None:
            return False
        if self.under_way:
            if not self.run.results.get(self.under_way[0]):
                return False
            self.under_way.popleft()
        if self.deferred is not None:
            number, self.deferred = self.deferred, None
            self._sample(number)
        return True


class _Rank:
    """Worker, model runner and model of one rank, in the order of vLLM's own calls; it waits where vLLM does."""

    def __init__(self, run: _Run, number: int) -> None:
        world = run.world
        self.run, self.number, self.world = run, number, world
        self.last = number == world.pp_size - 1
        self.device = Device(number, world.queues)
        self.calls: deque[tuple[str, int]] = deque()
        self.live: dict[int, int] = {}
        self.fed_back = np.zeros((SLOTS, 1 + world.drafts), dtype=np.int64)
        self.sends: list[Any] = []
        self.hidden: dict[int, Any] = {}
        self.values: dict[int, list[Any]] = {}  # of a step: what its broadcasts carry, in order
        self.sampled: list[Any] = []
        self.sending: tuple[int, int] = (0, 0)
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._wanted: Callable[[], bool] | None = None
        self._over = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        run.now = self
        self.incoming, self.outgoing = Stream(self.device), Stream(self.device)
        self.handler = _handler(world, number)
        self.worker, self.attachment = self._worker()

    def _worker(self) -> tuple[Any, Any]:
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(pipeline_parallel_size=self.world.pp_size),
            scheduler_config=SimpleNamespace(max_num_seqs=SLOTS),
        )
        runner = SimpleNamespace(pp_handler=self.handler, is_pooling_model=False)
        runner.req_states = SimpleNamespace(req_id_to_index=self.live)
        worker = SimpleNamespace(
            vllm_config=config, model_runner=runner, execute_model=self._execute, sample_tokens=self._sample,
            compile_or_warm_up_model=lambda: None, shutdown=lambda: None,
            **{name: lambda: None for name in ("sleep", "wake_up", "synchronize_device", "update_weights")},
            check_health=lambda output: None,
        )  # fmt: skip
        if self.world.receive is None:
            return worker, None
        from trtllm_pp_progress.vllm import attachment, shape
        from trtllm_pp_progress.vllm.settings import load_settings
        from trtllm_pp_progress.vllm.transport import Transport

        shared = "one queue" if self.world.queues == ONE else ""
        facts = shape.Facts(
            pp_size=self.world.pp_size, rank=self.number, platform="cuda", runner=shape.RUNNER, pooling=False,
            handler=shape.HANDLER, backend="nccl", unknown_shape=shape.unknown_shape(worker, self.world.pp_size),
            per_step=2 + bool(self.world.drafts and hasattr(self.handler, "broadcast_drafts")),
        )  # fmt: skip
        known = Transport(self.world.limit, facts.per_step, shared) if self.world.shipped else Transport(10**6, 1)
        settings = load_settings({}, receive=self.world.receive, timing="off", stall_warning_s=86400)
        with (
            mock.patch.object(shape, "observe", return_value=facts),
            mock.patch.object(attachment, "transport_here", return_value=known),
        ):
            try:
                attached = attachment.Attachment(worker, settings)
            except attachment.IncompatibleError:
                self.run.outcome.delays.append(0)
                return worker, None
        self.run.outcome.delays.append(attached.policy.delay)
        worker.compile_or_warm_up_model()
        attached._watch.stop()  # a thread of its own, with a clock, has no place here
        return worker, attached

    # The host's thread, and who lets it run.

    @property
    def busy(self) -> bool:
        return bool(self.calls) or self._wanted is not None or bool(self.device.stuck())

    @property
    def state(self) -> str:
        return "waiting in a step" if self._wanted else f"{len(self.calls)} calls to do" if self.calls else "idle"

    def call(self, name: str, number: int) -> None:
        self.calls.append((name, number))

    def advance(self) -> bool:
        """Let the host do one call, or go on in the middle of one; say whether it could."""
        self.run.now = self
        if self._wanted is not None:
            if not self._wanted():
                return False
            self._turn.release()
        elif not self.calls:
            return False
        else:
            name, number = self.calls.popleft()
            step = self.run.steps[number]
            if name != "execute_model" or self.number not in step.compiling:
                self._call(name, number)
                return True
            # It may wait in the middle: on a thread of its own, of which this one waits for its turn.
            self._thread = threading.Thread(target=self._aside, args=(name, number), daemon=True)
            self._thread.start()
        self._back.acquire()
        if self._error is not None:
            raise self._error
        return True

    def look(self) -> bool:
        """Let the stall watch look, as after a time without a step; say whether it found something to do."""
        if self.attachment is None or not self.attachment._under_way():
            return False
        self.run.now = self
        held = self.attachment.policy.held
        self.attachment._quiet()
        if self.attachment.policy.held:
            self.attachment._stalled(8.0, False)
        return held > self.attachment.policy.held

    def wait(self, wanted: Callable[[], bool]) -> None:
        """Stop the host, in the middle of a call, until something is so."""
        self._wanted = wanted
        self._back.release()
        self._turn.acquire()
        if self._over:
            raise _Abandoned
        self._wanted = None

    def end(self) -> None:
        self._over = True
        if self._wanted is not None and self._thread is not None:
            self._turn.release()
            self._thread.join(10)
        if self.attachment is not None:
            self.run.outcome.statuses.append(self.attachment.status())
            self.run.now = self
            self.attachment.detach()

    def _aside(self, name: str, number: int) -> None:
        try:
            self._call(name, number)
        except _Abandoned:
            return
        except BaseException as error:
            self._error = error
        self._back.release()

    def _call(self, name: str, number: int) -> None:
        step = self.run.steps[number]
        with torch.inference_mode():
            if name == "execute_model" and step.boundary:
                getattr(self.worker, step.boundary)()
            getattr(self.worker, name)(_Output(step, number))

    # What a worker does, in vLLM's order.

    def _execute(self, output: _Output) -> None:
        step, number = output.step, output.number
        main = self.device.main
        for sent in self.sends:
            main.wait_event(sent)
        self.sends = []
        carried: dict[str, Any] = {}
        received = None
        if step.rows and self.number:
            self.incoming.wait_stream(main)
            link = self.run.links[self.number - 1]
            link.receive(self.incoming, lambda got: carried.update(got), f"receive {number}")
            received = self.incoming.record_event()
        outputs = self._consume()
        if outputs is not None:
            main.issue(f"postprocess {number}", do=lambda: self._postprocess(number, outputs))
        for request, slot in step.freed:
            self.handler.on_req_idx_freed(slot)
            self.live.pop(request, None)
        for request, slot in step.added:
            self.live[request] = slot
            main.issue(f"add {request}", do=lambda slot=slot, request=request: self._add(slot, request))
        if self.number in step.compiling:  # loading a module waits for what is resident, freeing memory for everything
            stream = self.handler.broadcast_stream
            self.wait((lambda: not self.device.stuck()) if self.world.frees else stream.query)
        if not step.rows:
            return
        if received is not None:
            main.wait_event(received)
        main.issue(f"model {number}", do=lambda: self._model(step, number, carried))
        if not self.last:
            self.outgoing.wait_stream(main)
            inputs = self.hidden
            self.run.links[self.number].send(self.outgoing, lambda: inputs.pop(number), f"send {number}")
            self.sends.append(self.outgoing.record_event())

    def _sample(self, output: _Output) -> None:
        step, number = output.step, output.number
        batch, drafts = batch_of(step, self.world.drafts), bool(self.world.drafts)
        takes = "recv_drafts" in _parameters(type(self.handler).receive)
        spec = drafts and (step.drafts or not takes)
        if not self.last:
            self.handler.receive(batch, spec) if takes else self.handler.receive(batch)
            batch.num_computed_tokens_np[:] = 0  # what counts was decided at T
            return
        main, width = self.device.main, self._width(batch)
        main.issue(f"sample {number}", do=lambda: self._result(step, number, width))
        self.sending = (number, 0)
        rows = len(step.rows)
        counts = torch.zeros(rows, dtype=torch.int32)
        self.handler.broadcast(torch.zeros(rows, width, dtype=torch.int64), counts, counts, batch)
        if spec and "input_batch" in _parameters(getattr(type(self.handler), "broadcast_drafts", None)):
            self.handler.broadcast_drafts(torch.zeros(SLOTS, self.world.drafts, dtype=torch.int64), batch)
        elif spec and hasattr(self.handler, "broadcast_drafts"):
            self.handler.broadcast_drafts(torch.zeros(rows, self.world.drafts, dtype=torch.int64))
        main.issue(f"answer {number}", do=lambda: self.run.results.__setitem__(number, True))

    def broadcast(self, tensor: Any) -> None:
        """Issue what the handler broadcasts; the source's values are those of the device by then."""
        stream = self.device.current
        if self.last:
            number, place = self.sending
            self.sending = (number, place + 1)
            name = f"broadcast {number}.{place}"
            self.run.broadcasts.send(stream, lambda: (tuple(tensor.shape), self.values[number][place]), name)
            return
        filled = tensor.numpy()
        filled[...] = np.iinfo(filled.dtype).max

        def fill(message: Any) -> None:
            shape, value = message
            assert shape == filled.shape, f"rank {self.number}: {filled.shape} posted for {shape}"
            filled[...] = value

        self.run.broadcasts.receive(self.number, stream, fill, "receive of a result")

    def _consume(self) -> Any:
        return self.handler.get_prev_sampled_outputs()

    def _width(self, batch: Any) -> int:
        sample_len = getattr(self.handler, "_sample_len", None)
        return int(sample_len(batch)) if sample_len else int(self.handler.max_sample_len)

    # What the device does, when it does it.

    def _add(self, slot: int, request: int) -> None:
        self.fed_back[slot] = request

    def _model(self, step: Step, number: int, carried: dict[str, Any]) -> None:
        inputs = np.array([self._input(row) for row in step.rows])
        hidden = inputs
        if self.number:
            self.run.outcome.mismatched += int((carried["inputs"] != inputs).sum())
            hidden = carried["hidden"]
        self.hidden[number] = {"inputs": inputs, "hidden": (hidden * 31 + self.number + 7) % VOCABULARY}

    def _result(self, step: Step, number: int, width: int) -> None:
        hidden = self.hidden.pop(number)["hidden"]
        sampled = (hidden[:, None] * 17 + np.arange(width) * 101 + number) % VOCABULARY
        counts = np.where([row.samples for row in step.rows], 1 + hidden % width, 0)
        rejected = np.where(counts > 0, width - counts, 0)
        drafts = (sampled[:, :1] * 13 + np.arange(1, self.world.drafts + 1)) % VOCABULARY
        self.values[number] = [sampled, np.stack([counts, rejected]), drafts]
        self.sampled.append((number, sampled.tolist(), counts.tolist()))
        for row, slot in enumerate(row.slot for row in step.rows):
            if counts[row]:
                self._feed_back(slot, sampled[row], counts[row])

    def _postprocess(self, number: int, outputs: dict[str, Any]) -> None:
        seen = []
        tokens, counts = outputs["sampled_tokens"].numpy(), outputs["num_sampled"].numpy()
        for row, slot in enumerate(outputs["idx_mapping"].tolist()):
            if slot >= 0:
                seen.append((slot, tokens[row].tolist(), int(counts[row])))
                self._feed_back(slot, tokens[row], min(int(counts[row]), len(tokens[row])))
        self.run.outcome.consumed[self.number].append((number, seen))

    def _feed_back(self, slot: int, tokens: Any, count: int) -> None:
        self.fed_back[slot, 0] = tokens[count - 1]

    def _input(self, row: Any) -> int:
        if row.prefilling:
            return (row.request * 1009 + row.computed) % VOCABULARY
        return int(self.fed_back[row.slot, 0]) % VOCABULARY


@dataclass
class _Output:
    """What the engine tells a worker."""

    step: Step
    number: int

    @property
    def total_num_scheduled_tokens(self) -> int:
        return self.step.total_num_scheduled_tokens

    @property
    def pending_structured_output_tokens(self) -> bool:
        return self.step.deferred

    @property
    def finished_req_ids(self) -> set[int]:
        return self.step.finished_req_ids


def _parameters(function: Any) -> tuple[str, ...]:
    return function.__code__.co_varnames[: function.__code__.co_argcount] if function else ()


def _handler(world: World, rank: int) -> Any:
    last = world.pp_size - 1
    group = SimpleNamespace(
        is_last_rank=rank == last, last_rank=last, world_size=world.pp_size, rank_in_group=rank,
        make_sibling_device_group=lambda group_desc: ("the group of rank", rank),
    )  # fmt: skip
    module = _module(world.pp_utils)
    with mock.patch.object(module, "get_pp_group", return_value=group):
        return module.PPHandler(SLOTS, world.drafts, torch.device("cpu"))


@cache
def _module(path: str) -> Any:
    """Return the module of the handler, of the installed release or from another's file."""
    import vllm.utils.torch_utils as torch_utils
    from vllm.v1.worker.gpu import buffer_utils, pp_utils

    torch_utils.PIN_MEMORY = False
    if not path:
        return pp_utils
    buffer_utils.async_copy_to_gpu = torch_utils.async_tensor_h2d  # its name up to 0.28
    name = f"pp_utils_of_{path.replace('/', '_').replace('.', '_')}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


__all__ = ["MANY", "ONE", "Hang", "Outcome", "World", "hangs", "run"]

"""Runs vLLM's real PPHandler on every rank of a CPU pipeline: one process a rank, gloo, fake streams, a toy model.

The toy model makes every value depend on the values fed back before, so that a token that is wrong, late or in
another's slot changes everything after it. A run is compared with the same run of stock vLLM.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import inspect
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_cuda
import numpy as np
import torch
from fake_cuda import Cuda
from pp_engine import Load, Step, batch_of, plan

torch.set_num_threads(1)  # and so no pool of threads that a fork would lose

VOCABULARY = 50_021
SLOTS = 16


@dataclass(frozen=True)
class Scenario:
    """One run; `policies` are a rank's settings (none: stock vLLM), the last rank's among them."""

    pp_size: int
    seed: int = 1
    load: Load = field(default_factory=Load)
    policies: tuple[dict[str, Any] | None, ...] = ()
    warm_up: int = 6  # steps with real collectives before the policy starts; 0 as with enforce_eager
    pp_utils: str = ""  # another release's file
    sabotage: str = ""  # a function of sabotage, called in every rank before the worker is attached
    blocking: bool = False  # broadcasts block the host, unlike NCCL's
    p2p: bool = True
    abrupt: bool = False  # shut down with requests alive
    real_runner: bool = False  # vLLM's own update_pp_decode_requests and sample_tokens on ranks that receive
    stops: int = -1  # the step in which the last rank's process is stopped dead
    patience: float = 60.0  # of every wait, in seconds
    ahead: int = 8  # broadcasts that the transport is said to take without a receiver; gloo takes none

    @property
    def stock(self) -> Scenario:
        return replace(self, policies=(), sabotage="", blocking=False, stops=-1)


@dataclass
class Outcome:
    """What one rank saw."""

    consumed: list[Any] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    collectives: list[Any] = field(default_factory=list)
    poisoned: int = 0
    mismatched: int = 0
    status: dict[str, Any] = field(default_factory=dict)


class Broken(AssertionError):
    """A run that did not end as it should."""


def run(scenario: Scenario, deadline: float = 150.0) -> list[Outcome]:
    """Run a scenario to its end; Broken with every rank's last words if one fails or the deadline passes."""
    context = multiprocessing.get_context("fork")
    gates = [context.Semaphore(scenario.pp_size + 1) for _ in range(scenario.pp_size)]
    silences = [context.Semaphore(0) for _ in range(scenario.pp_size)]
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        pipes, processes = [], []
        for rank in range(scenario.pp_size):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (scenario, rank, meeting, gates, silences, theirs)
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _gather(pipes, deadline)
        finally:
            for process in processes:
                process.kill()  # by its own id; a rank that has answered has nothing left to do
                process.join()


def _gather(pipes: list[Any], deadline: float) -> list[Outcome]:
    until = time.monotonic() + deadline
    outcomes: dict[int, Outcome] = {}
    troubles: list[str] = []
    silent = dict(zip(pipes, range(len(pipes)), strict=True))
    while silent and (left := until - time.monotonic()) > 0:
        for pipe in wait(list(silent), left):
            rank = silent.pop(pipe)
            try:
                answer = pipe.recv()
            except EOFError:
                answer = "died"
            if isinstance(answer, Outcome):
                outcomes[rank] = answer
            else:
                troubles.append(f"rank {rank}: {answer}")
                until = min(until, time.monotonic() + 1)  # the others wait for it in vain
    if not troubles:
        troubles = [f"rank {rank}: no answer within {deadline:g} s" for rank in silent.values()]
    if troubles:
        raise Broken("\n".join(troubles))
    return [outcomes[rank] for rank in sorted(outcomes)]


def _rank(scenario: Scenario, rank: int, meeting: str, gates: list[Any], silences: list[Any], pipe: Any) -> None:
    faulthandler.disable()  # a control that aborts says enough
    said: list[str] = []
    log = logging.getLogger("vllm.trtllm_pp_progress")
    log.addHandler(handler := logging.Handler(logging.WARNING))
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    try:
        pipe.send(_Rank(scenario, rank, meeting, gates, silences).run())
    except BaseException:
        pipe.send("\n".join([traceback.format_exc(), *said]))
    silences[rank].acquire()  # stay, connections open, until the parent has heard from all and ends this process


class _Rank:
    """One rank's process: worker, model runner and model in one, in the order of vLLM's own calls."""

    def __init__(self, scenario: Scenario, rank: int, meeting: str, gates: list[Any], silences: list[Any]) -> None:
        self.scenario, self.rank, self.gates, self.silences = scenario, rank, gates, silences
        self.last = rank == scenario.pp_size - 1
        self.outcome = Outcome()
        fake_cuda.PATIENCE = timedelta(seconds=scenario.patience)
        self.cuda = Cuda(scenario.blocking)
        self.cuda.install()
        self.steps = plan(scenario.seed, scenario.pp_size, scenario.load)
        if scenario.abrupt:
            self.steps.pop()
        self.now = -1
        self.fed_back = np.zeros((SLOTS, 1 + scenario.load.drafts), dtype=np.int64)
        self.sends: list[Any] = []
        torch.use_deterministic_algorithms(True)  # torch.empty then fills with the largest number
        torch.utils.deterministic.fill_uninitialized_memory = True
        self.group = _pipeline_group(scenario.pp_size, rank, meeting)
        handler_class = _handler_class(scenario.pp_utils)
        with torch.inference_mode():
            self.handler = handler_class(SLOTS, scenario.load.drafts, torch.device("cpu"))
        self.takes_drafts = "recv_drafts" in inspect.signature(self.handler.receive).parameters
        self.worker = self._worker()

    def _worker(self) -> Any:
        """Return a worker with the surface that the policy sees, and attach the policy to it."""
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(pipeline_parallel_size=self.scenario.pp_size),
            scheduler_config=SimpleNamespace(max_num_seqs=SLOTS),
        )
        self.live: dict[int, int] = {}
        self.runner = _real_runner() if self.scenario.real_runner else SimpleNamespace()
        self.runner.pp_handler = self.handler
        self.runner.is_pooling_model = False
        self.runner.req_states = SimpleNamespace(req_id_to_index=self.live)
        self.runner.postprocess_sampled = self._postprocess
        quiet = {name: self._boundary for name in ("sleep", "wake_up", "synchronize_device", "update_weights")}
        worker = SimpleNamespace(
            vllm_config=config, model_runner=self.runner, execute_model=self.execute_model,
            sample_tokens=self.sample_tokens, compile_or_warm_up_model=self.warm_up, shutdown=self.shutdown, **quiet,
        )  # fmt: skip
        policies = self.scenario.policies
        if policies and (arguments := policies[self.rank]) is not None:
            import sabotage

            from trtllm_pp_progress.vllm import attach, attachment, shape
            from trtllm_pp_progress.vllm.transport import Transport

            attachment.transport_here = lambda platform, per_step, size: Transport(self.scenario.ahead, per_step)
            observe = shape.observe
            shape.observe = lambda worker: replace(
                observe(worker), platform="cuda", backend="nccl", runner=shape.RUNNER, handler=shape.HANDLER
            )
            if self.scenario.sabotage:
                getattr(sabotage, self.scenario.sabotage)()
            attach(worker, **arguments)
        return worker

    def run(self) -> Outcome:
        with torch.inference_mode():
            self.worker.compile_or_warm_up_model()
            for step in self.steps[self.now + 1 :]:
                self.one(step)
        self.worker.shutdown()
        self.outcome.collectives = self.cuda.collectives
        return self.outcome

    def one(self, step: Step) -> None:
        """Run one engine step; the engine has at most pp_size + 1 of them under way."""
        if not self.gates[self.rank].acquire(timeout=self.scenario.patience):
            raise Broken(f"step {self.now + 1}: the engine never got the results that it waits for")
        self.now += 1
        if step.boundary:
            getattr(self.worker, step.boundary)()
        self.worker.execute_model(step)
        if step.rows:
            self.worker.sample_tokens(step)
        if self.last:
            for gate in self.gates:
                gate.release()
        if step.silence:
            self.silence()

    def silence(self) -> None:
        """No step comes until the source's broadcasts have all ended."""
        if self.last:
            for work in self.handler.broadcast_stream.works:
                try:
                    fake_cuda.wait(work, 0.5)
                except TimeoutError:
                    raise Broken(f"step {self.now}: source resident while idle") from None
            for gate in self.silences:
                gate.release()
        if not self.silences[self.rank].acquire(timeout=self.scenario.patience):
            raise Broken(f"step {self.now}: silence did not end")

    # What a worker does, in vLLM's order.

    def warm_up(self) -> None:
        for step in self.steps[: self.scenario.warm_up]:
            self.one(step)

    def _boundary(self) -> None:
        """Expect, like sleep and its kin, that everything under way ends without another step."""
        self.handler.broadcast_stream.synchronize()

    def shutdown(self) -> None:
        for work in self.sends:
            fake_cuda.wait(work)
        self.handler.broadcast_stream.synchronize()
        from trtllm_pp_progress.vllm.attachment import attachments

        self.outcome.status = next((attachment.status() for attachment in attachments), {})

    def execute_model(self, step: Step) -> None:
        for work in self.sends:
            fake_cuda.wait(work)
        self.sends = []
        size = len(step.rows)
        carried = torch.zeros(2, size, dtype=torch.int64)
        receiving = None
        if size and self.rank and self.scenario.p2p:
            receiving = torch.distributed.irecv(carried, src=self.rank - 1, group=self.group)
        self._consume()
        for request, slot in step.freed:
            self.handler.on_req_idx_freed(slot)
            self.live.pop(request, None)
        for request, slot in step.added:
            self.live[request] = slot
            self.fed_back[slot] = request
        if self.last and self.now == self.scenario.stops:
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.rank in step.compiling:  # loading a module waits for the kernels that are resident
            self.handler.broadcast_stream.synchronize()
        if not size:
            return
        inputs = [self._input(row) for row in step.rows]
        self.outcome.inputs.append((self.now, tuple(inputs)))
        self.hidden = np.array(inputs)
        if receiving is not None:
            fake_cuda.wait(receiving)
            self.hidden = carried[1].numpy().copy()
            self.outcome.mismatched += int((carried[0].numpy() != np.array(inputs)).sum())
        self.hidden = (self.hidden * 31 + self.rank + 7) % VOCABULARY
        if not self.last and self.scenario.p2p:
            sent = torch.from_numpy(np.stack([np.array(inputs), self.hidden]))
            self.sends.append(torch.distributed.isend(sent, dst=self.rank + 1, group=self.group))

    def sample_tokens(self, step: Step) -> None:
        batch = batch_of(step, self.scenario.load.drafts)
        spec = bool(self.scenario.load.drafts) and (step.drafts or not self.takes_drafts)
        if not self.last and self.scenario.real_runner:
            self.runner.execute_model_state = _State(input_batch=batch, num_spec_tokens_to_schedule=int(spec))
            self.runner.sample_tokens(None)
        elif not self.last:
            self.handler.receive(batch, spec) if self.takes_drafts else self.handler.receive(batch)
        if not self.last:
            batch.num_computed_tokens_np[:] = 0  # what counts was decided at T; a rollback since then changes nothing
            return
        if not self.scenario.p2p:  # alone, the last rank can tell what the others would have sent
            self.hidden = np.array([self._input(row) for row in step.rows])
        width = self._width(batch)
        sampled = (self.hidden[:, None] * 17 + np.arange(width) * 101 + self.now) % VOCABULARY
        counts = np.where([row.samples for row in step.rows], 1 + self.hidden % width, 0)
        rejected = np.where(counts > 0, width - counts, 0)
        tensors = [torch.from_numpy(sampled), *(torch.from_numpy(a.astype(np.int32)) for a in (counts, rejected))]
        self.handler.broadcast(*tensors, batch)
        drafts = (sampled[:, :1] * 13 + np.arange(1, self.scenario.load.drafts + 1)) % VOCABULARY
        for row, slot in enumerate(batch.idx_mapping_np):
            if counts[row]:
                self._feed_back(slot, sampled[row], counts[row], drafts[row] if spec else None)
        if spec and "input_batch" in inspect.signature(self.handler.broadcast_drafts).parameters:
            table = torch.zeros(SLOTS, drafts.shape[1], dtype=torch.int64)
            table[batch.idx_mapping] = torch.from_numpy(drafts)
            self.handler.broadcast_drafts(table, batch)
        elif spec:
            self.handler.broadcast_drafts(torch.from_numpy(drafts))

    def _width(self, batch: Any) -> int:
        sample_len = getattr(self.handler, "_sample_len", None)
        return int(sample_len(batch)) if sample_len else int(self.handler.max_sample_len)

    def _consume(self) -> None:
        if self.scenario.real_runner:
            self.runner.update_pp_decode_requests()
        elif "draft_tokens_to_update" in inspect.signature(type(self.handler).get_prev_sampled_outputs).parameters:
            outputs = self.handler.get_prev_sampled_outputs(torch.from_numpy(self.fed_back[:, 1:]))
        else:
            outputs = self.handler.get_prev_sampled_outputs()
        if not self.scenario.real_runner and outputs is not None:
            self._postprocess(**outputs)

    def _postprocess(self, **outputs: Any) -> None:
        slots = outputs.pop("idx_mapping").tolist()
        # Copied first: an unfilled buffer may fill while it is read.
        values = {name: tensor.clone().numpy() for name, tensor in outputs.items() if tensor is not None}
        seen = []
        for row, slot in enumerate(slots):
            mine = {name: array[row] for name, array in values.items()}
            if slot < 0:
                continue
            if any((value == np.iinfo(value.dtype).max).any() for value in mine.values()):
                self.outcome.poisoned += 1
                continue
            seen.append((slot, *(tuple(np.ravel(mine[name]).tolist()) for name in sorted(mine))))
            self._feed_back(slot, mine["sampled_tokens"], mine["num_sampled"], mine.get("draft_tokens"))
        self.outcome.consumed.append((self.now, tuple(seen)))

    def _feed_back(self, slot: int, tokens: Any, count: int, drafts: Any) -> None:
        self.fed_back[slot, 0] = tokens[count - 1]
        if drafts is not None:
            self.fed_back[slot, 1:] = drafts

    def _input(self, row: Any) -> int:
        if row.prefilling:
            return (row.request * 1009 + row.computed) % VOCABULARY
        return int(self.fed_back[row.slot].sum()) % VOCABULARY


class _State(SimpleNamespace):
    """What execute_model leaves for sample_tokens; a field that no receiving rank looks into is None."""

    def __getattr__(self, name: str) -> None:
        return None


def _real_runner() -> Any:
    """Return vLLM's own model runner with everything left out that needs a model or a GPU."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    runner = object.__new__(GPUModelRunner)
    runner.is_last_pp_rank = False
    runner.pcp_manager = None
    runner.eplb = SimpleNamespace(step=lambda **flags: None)
    runner.kv_connector = SimpleNamespace(post_forward=lambda finished: None)
    runner.model_state = SimpleNamespace(postprocess_state=lambda mapping, count: None)
    runner.postprocess_num_computed_tokens = lambda batch: None
    return runner


def _pipeline_group(pp_size: int, rank: int, meeting: str) -> Any:
    """Set vLLM's own groups up over gloo, and return the one for activations."""
    import vllm.utils.torch_utils as torch_utils
    from vllm.distributed import parallel_state

    torch_utils.PIN_MEMORY = False
    parallel_state.init_distributed_environment(pp_size, rank, meeting, local_rank=rank, backend="gloo")
    ranks = [list(range(pp_size))]
    parallel_state._PP = parallel_state.init_model_parallel_group(ranks, rank, "gloo", group_name="pp")
    return parallel_state.get_pp_group().cpu_group


def _handler_class(path: str) -> Any:
    """Return PPHandler, of the installed release or of another's file under the installed module's name."""
    name = "vllm.v1.worker.gpu.pp_utils"
    if path:
        from vllm.utils.torch_utils import async_tensor_h2d
        from vllm.v1.worker.gpu import buffer_utils

        buffer_utils.async_copy_to_gpu = async_tensor_h2d  # its name up to 0.28
        spec = importlib.util.spec_from_file_location(name, Path(path))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    module = importlib.import_module(name)
    return module.PPHandler


def policy(receive: Any, **more: Any) -> dict[str, Any]:
    """Return the arguments of one rank's policy."""
    return {"receive": receive, **more}


def everywhere(scenario: Scenario, receive: Any, **more: Any) -> Scenario:
    """Return the scenario with one policy on every rank."""
    return replace(scenario, policies=(policy(receive, **more),) * scenario.pp_size)


def compare(ours: list[Outcome], stock: list[Outcome]) -> None:
    """Demand the same values in the same slots at the same steps, and the same collectives on every rank."""
    for rank, (mine, theirs) in enumerate(zip(ours, stock, strict=True)):
        if mine.poisoned or mine.mismatched:
            raise Broken(f"rank {rank}: {mine.poisoned} poisoned reads, {mine.mismatched} wrong inputs")
        for what in ("consumed", "inputs", "collectives"):
            if getattr(mine, what) != getattr(theirs, what):
                raise Broken(f"rank {rank}: {what} differ from stock's")
        if mine.collectives != ours[-1].collectives:
            raise Broken(f"rank {rank}: collectives differ from the source's")

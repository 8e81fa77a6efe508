"""Reports from the field about vLLM, by their number in tests/CASES.md."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from pp_engine import Load
from pp_world import Scenario, compare, everywhere, run
from stubs import PPHandler, make_worker
from test_attach import attached, steps
from test_gates import GOOD

from trtllm_pp_progress.vllm import IncompatibleError, attach, shape
from trtllm_pp_progress.vllm.shape import refusal, unknown_shape


class TestCase61:
    """vLLM's serialization refuses a function; a method's name needs no setting."""

    def test_case_61_a_function_is_refused(self, monkeypatch):
        """Control: what needs VLLM_ALLOW_INSECURE_SERIALIZATION does not pass the real encoder without it."""
        from vllm.v1.serial_utils import MsgpackEncoder

        monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION", raising=False)
        with pytest.raises(TypeError, match="INSECURE"):
            MsgpackEncoder().encode((0, 1, "collective_rpc", (lambda worker: 1, None, (), None)))

    def test_case_61_a_workers_status_by_the_name_of_its_method(self, seen, posted, monkeypatch):
        """Asked for as the client asks, called as the worker calls, and answered as the engine answers."""
        from vllm.v1.engine import UtilityOutput
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult, run_method
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        import trtllm_pp_progress.vllm as receive

        monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION", raising=False)
        asked = MsgpackEncoder().encode((0, 1, "collective_rpc", ("receive_policy_status", None, (), None)))
        method = MsgpackDecoder().decode(asked)[3][0]
        monkeypatch.setattr(WorkerWrapperBase, "init_device", lambda self: None)
        with receive.install(receive=2, timing="off"):
            wrapper = object.__new__(WorkerWrapperBase)
            wrapper.worker = make_worker(handler := PPHandler())
            wrapper.init_device()
            wrapper.worker.compile_or_warm_up_model()
            steps(handler, 5)
            answer = run_method(wrapper, method, (), {})
            sent = MsgpackEncoder().encode(UtilityOutput(1, result=UtilityResult([answer])))
            (back,) = MsgpackDecoder(UtilityOutput).decode(sent).result.result
            assert back == answer == receive.status()
            assert back["workers"][0]["counters"]["posts"] == 3
        assert not hasattr(WorkerWrapperBase, "receive_policy_status")


def test_case_70_updates_from_another_thread_beside_steps(seen, posted):
    """Each receive is posted once, and all of them in order, whoever flushes in the middle of whichever step."""
    handler = PPHandler()
    worker, _, _ = attached(handler)
    worker.compile_or_warm_up_model()
    over = threading.Event()

    def update():
        while not over.is_set():
            worker.update_weights()

    threads = [threading.Thread(target=update) for _ in range(2)]
    for thread in threads:
        thread.start()
    steps(handler, 3000)
    over.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    worker.update_weights()
    assert posted == [(step, number) for step in range(1, 3001) for number in (0, 1)]


class TestCase71:
    """The feedback by other means is left alone, and why is said."""

    @staticmethod
    def receives(self, batch):
        self.work = torch.distributed.broadcast(batch, src=self.last, async_op=True)

    @staticmethod
    def point_to_point(self, batch):
        torch.distributed.recv(batch, src=self.last, group=self.group)

    @staticmethod
    def helped(self, batch):
        self._receive_all(batch)

    @pytest.mark.parametrize(
        ("name", "words"),
        [("receives", "work objects"), ("point_to_point", "no broadcast"), ("helped", "no broadcast")],
    )
    def test_case_71_what_does_not_broadcast_plainly_is_refused(self, monkeypatch, name, words):
        """Work handles, point to point, a broadcast that was moved into a helper: told apart by the code itself."""
        handler = PPHandler()
        monkeypatch.setattr(PPHandler, "receive", getattr(self, name))
        shape = unknown_shape(make_worker(handler), 4)
        assert words in shape
        assert words in refusal(replace(GOOD, unknown_shape=shape))

    def test_case_71_a_vllm_that_defers_itself_is_known(self, seen):
        """The handler of vllm-project/vllm#53948: said as such, with the variable, and not as an error of shape."""
        handler = PPHandler()
        handler.requested_recv_launch_delay = 3
        handler.enable_deferred_collectives = lambda: True
        assert any(hasattr(handler, name) for name in shape.DEFERS_ITSELF)
        seen.facts = replace(GOOD, defers_itself=True, unknown_shape="the handler's receive calls no broadcast")
        with pytest.raises(IncompatibleError, match="VLLM_PP_DEFER_SAMPLED_TOKEN_RECV"):
            attach(make_worker(handler), receive=2)


class TestCase72:
    """Two stages with drafts."""

    def test_case_72_the_v1_runner_is_left_alone(self):
        """By its name, which is another."""
        reason = refusal(replace(GOOD, runner="vllm.v1.worker.gpu_model_runner.GPUModelRunner"))
        assert "only Model Runner V2" in reason

    def test_case_72_four_drafts_on_two_stages(self, stock_run):
        """400 steps over gloo: every token is stock's."""
        scenario = everywhere(Scenario(2, seed=72, load=Load(drafts=4)), "rank-aware")
        outcomes = run(scenario)
        compare(outcomes, stock_run(scenario))
        receiver, source = (outcome.status["counters"] for outcome in outcomes)
        assert receiver["collectives"] == source["collectives"] > 300

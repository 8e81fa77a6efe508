"""Which workers the policy takes, and what it says to the others."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import wraps

import pytest
from stubs import PPHandler, make_worker

from trtllm_pp_progress.vllm.shape import HANDLER, RUNNER, Facts, refusal, unknown_shape

GOOD = Facts(
    pp_size=4, rank=0, platform="cuda", runner=RUNNER, pooling=False, handler=HANDLER, backend="nccl",
    unknown_shape="",
)  # fmt: skip


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_both_platforms_pass(platform):
    """CUDA and ROCm order a receive by streams."""
    assert refusal(replace(GOOD, platform=platform)) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pp_size": 1}, "size is 1"),
        ({"platform": "cpu"}, "platform is cpu"),
        ({"platform": "xpu"}, "platform is xpu"),
        ({"runner": "vllm.v1.worker.gpu_model_runner.GPUModelRunner"}, "gpu_model_runner.GPUModelRunner"),
        ({"runner": "vllm_omni.runner.OmniRunner"}, "OmniRunner"),
        ({"pooling": True}, "pooling"),
        ({"defers_itself": True}, "VLLM_PP_DEFER_SAMPLED_TOKEN_RECV"),
        ({"handler": "vllm_ascend.pp.AscendHandler"}, "AscendHandler"),
        ({"backend": "gloo"}, "backend is gloo"),
        ({"backend": "mpi"}, "backend is mpi"),
        ({"unknown_shape": "the handler has no queue"}, "has no queue"),
    ],
)
def test_every_gate_has_its_own_words(change, words):
    """A refusal names what was found."""
    reason = refusal(replace(GOOD, **change))
    assert reason is not None
    assert words in reason


def test_the_reasons_differ():
    """No two shape can be mistaken for each other."""
    changes = ({"pp_size": 1}, {"platform": "cpu"}, {"runner": "x"}, {"pooling": True}, {"defers_itself": True},
               {"handler": "x"}, {"backend": "gloo"}, {"unknown_shape": "x"})  # fmt: skip
    assert len({refusal(replace(GOOD, **change)) for change in changes}) == len(changes)


class TestShape:
    """The handler must have everything that the adapter uses."""

    def test_a_known_handler_has_it_all(self):
        """The stub's shape is vLLM's, as far as the adapter looks."""
        assert unknown_shape(make_worker(PPHandler()), 4) == ""

    def test_vllms_own_handler_has_it_all(self):
        """The installed vLLM's class is known; on the last rank, whose queue is empty, too."""
        from vllm.v1.worker.gpu.pp_utils import PPHandler as Real

        handler = object.__new__(Real)
        vars(handler).update(
            is_last_rank=False, queue=deque([None] * 4), main_stream=1, broadcast_stream=1, broadcast_group=1
        )
        assert unknown_shape(make_worker(handler), 4) == ""
        vars(handler).update(is_last_rank=True, queue=deque())
        assert unknown_shape(make_worker(handler), 4) == ""

    @pytest.mark.parametrize("name", ["queue", "main_stream", "broadcast_stream", "broadcast_group"])
    def test_a_missing_attribute(self, name):
        """The first one that is missing is named."""
        handler = PPHandler()
        delattr(handler, name)
        assert unknown_shape(make_worker(handler), 4) == f"the handler has no {name}"

    def test_a_missing_side(self):
        """A handler that cannot broadcast, or not receive, is half of a pair."""
        handler = PPHandler()
        handler.broadcast = None
        assert "no broadcast" in unknown_shape(make_worker(handler), 4)

    def test_a_queue_of_another_kind_or_length(self):
        """A list has no popleft, and another depth has another cadence."""
        handler = PPHandler()
        handler.queue = [None] * 4
        assert "is a list" in unknown_shape(make_worker(handler), 4)
        assert "holds 1 steps, not pp_size=4" in unknown_shape(make_worker(PPHandler(depth=1)), 4)

    def test_a_receive_that_needs_its_works_or_broadcasts_nothing(self):
        """Works cannot be handed out for what is not posted; without broadcasts there is nothing to post."""

        class Waits(PPHandler):
            def receive(self, batch):
                self.work = self.torch.distributed.broadcast(batch, async_op=True)

        class Packs(PPHandler):
            def receive(self, batch):
                return self.group.recv(batch)

        assert "work objects" in unknown_shape(make_worker(Waits()), 4)
        assert "no broadcast" in unknown_shape(make_worker(Packs()), 4)

    def test_a_decorated_receive_is_looked_through(self):
        """A wrapper that names what it wraps hides nothing."""

        class Decorated(PPHandler):
            @wraps(PPHandler.receive)
            def receive(self, *args):
                return PPHandler.receive(self, *args)

        assert unknown_shape(make_worker(Decorated()), 4) == ""

    def test_a_consumer_without_the_event(self):
        """What does not wait by the slot's event cannot be given another one."""

        class Synchronises(PPHandler):
            def get_prev_sampled_outputs(self):
                self.broadcast_stream.synchronize()

        assert "without its event" in unknown_shape(make_worker(Synchronises()), 4)

    def test_no_word_on_live_requests(self):
        """Without it the idle boundary could not be seen."""
        worker = make_worker(PPHandler())
        del worker.model_runner.req_states
        assert "which requests live" in unknown_shape(worker, 4)

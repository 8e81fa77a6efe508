"""The performance case's static stage against transformers' own generate, on a CPU in one process."""

import socket
import threading
from dataclasses import replace

import pytest
import torch
import transformers

import decoder
from case import links, model, stage
from case.gpu_links import Ipc
from case.placed import PIECE, PLACES
from case.shared import Shared
from trtllm_pp_progress.tools.host import Request

TINY = decoder.resolve("qwen3-random:tiny")
PROMPTS = [[1, 2, 3], [7] * 9, list(range(20, 60)), [250, 40]]
TOKENS = 24


@pytest.fixture(scope="module")
def expected():
    """Return what transformers generates."""
    return decoder.generate(TINY, PROMPTS, TOKENS)


def generate(spec, prompts, batch):
    """Return what the static model generates."""
    return model.generate(spec, prompts, TOKENS, batch=batch, length=80, device="cpu", dtype="float32")


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_tokens_are_those_of_transformers(expected, batch):
    """Alone and together with requests of other lengths."""
    assert generate(TINY, PROMPTS, batch) == expected


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_gives_the_tokens_of_transformers(tmp_path, tied):
    """A Qwen3 checkpoint in several files, with norms that are not all ones, and a head of its own or not."""
    config = transformers.Qwen3Config(
        hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=12, vocab_size=300, max_position_embeddings=512, tie_word_embeddings=tied, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(5)
    whole = transformers.Qwen3ForCausalLM(config).eval()
    for name, parameter in whole.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    whole.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    prompts = [[1, 2, 3], [250, 40], [7] * 9, list(range(20, 60))]
    answers = decoder.generate(whole, prompts, TOKENS)
    assert len({tuple(answer) for answer in answers}) == 4
    assert generate(decoder.resolve(str(tmp_path)), prompts, 2) == answers


def test_another_family_is_refused(tmp_path):
    """The case's model is Qwen3."""
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                                 num_key_value_heads=2, vocab_size=64)
    ).save_pretrained(tmp_path)  # fmt: skip
    with pytest.raises(decoder.ModelError, match="is of type 'llama': the perf case runs qwen3"):
        generate(decoder.resolve(str(tmp_path)), PROMPTS, 1)


def test_another_rotary_embedding_is_refused():
    """It would give other tokens."""
    config = {**TINY.config, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}}
    with pytest.raises(decoder.ModelError, match="rope type 'yarn'"):
        generate(replace(TINY, config=config), PROMPTS, 1)


class Direct:
    """A link within this process: rows wait in a list until the next stage takes them."""

    in_stream_order = False

    def __init__(self):
        self.rows = []
        self.there = threading.Semaphore(0)

    def send(self, rows):
        """Keep a copy."""
        self.rows.append(rows.clone())
        self.there.release()

    def receive(self, rows):
        """Wait for the next."""
        assert self.there.acquire(timeout=30)
        rows.copy_(self.rows.pop(0))

    def close(self):
        """Do nothing."""


def pipeline(count, slots):
    """Return connected stages of the tiny model."""
    between = [Direct() for _ in range(count - 1)]
    return [
        stage.CaseStage(
            model.StaticModel(TINY, rank, count, slots=slots, length=80, device="cpu", dtype="float32"),
            between[rank - 1] if rank else None,
            between[rank] if rank < count - 1 else None,
            100,
            slots,
        )
        for rank in range(count)
    ]


def steps(stages, requests, tokens):
    """Run requests together for some steps, without an executor."""
    for _ in range(tokens):
        for each in stages:
            each.launch(requests)
        host = stages[-1].sampled()
        for each in stages[:-1]:
            assert each.check(host) == 0
        for request, token in zip(requests, host.new_tokens, strict=True):
            request.computed += 1 if request.computed else len(request.prompt)
            request.tokens.append(token)
    return [request.tokens for request in requests]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_stages_together_give_the_tokens_of_transformers(expected, count):
    """Requests of a batch, then others in the freed slots, then one in a slot that is no neighbour."""
    stages = pipeline(count, 4)
    first = [Request(i, prompt, TOKENS) for i, prompt in enumerate(PROMPTS)]
    assert steps(stages, first, TOKENS) == expected
    for each in stages:
        for request in (first[0], first[2]):
            each.release(request)
    again = [Request(10 + i, PROMPTS[i], TOKENS) for i in (3, 1)]  # slots 0 and 2: not neighbours
    assert steps(stages, again, TOKENS) == [expected[3], expected[1]]
    spans = stages[-1].spans()
    assert sorted(spans) == list(range(2 * TOKENS))
    assert [decodes for _, _, decodes in spans.values()] == ([False] + [True] * (TOKENS - 1)) * 2
    for each in stages:
        each.close()


def test_a_new_run_begins_anew(expected):
    """Slots, numbers and notes of the last run are gone; caches are overwritten."""
    stages = pipeline(2, 2)
    steps(stages, [Request(0, PROMPTS[2], TOKENS)], 5)
    for each in stages:
        each.begin()
    assert steps(stages, [Request(0, PROMPTS[1], TOKENS)], TOKENS) == [expected[1]]
    assert sorted(stages[0].spans()) == list(range(TOKENS))
    for each in stages:
        each.close()


def test_a_sample_state_that_is_not_the_one_due_is_counted():
    """Another payload, and another number."""
    stages = pipeline(2, 1)
    request = [Request(0, PROMPTS[0], 3)]
    for each in stages:
        each.launch(request)
    host = stages[-1].sampled()
    host.payload = bytes(100)
    assert stages[0].check(host) == 1
    host.payload, host.step = stages[0]._payloads[1], 7
    assert stages[0].check(host) == 1
    for each in stages:
        each.close()


def test_more_requests_than_slots_are_refused():
    """Nothing is evicted in silence."""
    stages = pipeline(1, 2)
    with pytest.raises(RuntimeError, match="request 2 has no slot: 2 are in use"):
        stages[0].launch([Request(i, [1], 1) for i in range(3)])


def test_a_failing_device_thread_is_what_the_executor_sees(monkeypatch):
    """And not a wait without end."""
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    stages = pipeline(2, 1)
    request = [Request(0, [TINY.vocabulary + 5], 1)]
    stages[1]._before.receive = lambda rows: (_ for _ in ()).throw(links.LinkError("gone"))
    stages[1].launch(request)
    with pytest.raises(RuntimeError, match="the device thread failed") as seen:
        stages[1].sampled()
    assert str(seen.value.__cause__) == "gone"
    for each in stages:
        each.close()


@pytest.mark.parametrize(
    ("kind", "tells"), [("ipc", "needs a GPU"), ("nccl", "needs a GPU"), ("pigeon", "shared, ipc, nccl")]
)
def test_a_link_that_cannot_be_had_is_refused(kind, tells):
    """Before anything is connected."""
    with pytest.raises(links.LinkError, match=tells):
        links.connect(kind, None, 8, torch.float32, torch.device("cpu"))


@pytest.fixture
def shared(tmp_path):
    """Return both ends of a shared link, which may be used from two threads."""
    here, there = socket.socketpair()
    path = tmp_path / "places"
    path.touch()
    ends = [Shared(end, str(path), 4, torch.float32, torch.device("cpu")) for end in (here, there)]
    yield ends
    for end in ends:
        end.close()


@pytest.mark.parametrize("count", [1, PIECE, 3 * PIECE + 5, 2 * PLACES * PIECE + 1])
def test_rows_arrive_as_they_were_sent(shared, count):
    """One row, and more than all places hold: then the sender waits for the receiver."""
    sender, receiver = shared
    rows = torch.arange(count * 4, dtype=torch.float32).view(count, 4)
    sending = threading.Thread(target=sender.send, args=(rows,), daemon=True)
    sending.start()
    if count > PLACES * PIECE:
        sending.join(0.2)
        assert sending.is_alive()
    got = torch.empty_like(rows)
    receiver.receive(got)
    sending.join(30)
    assert not sending.is_alive()
    assert torch.equal(got, rows)


def test_a_neighbour_that_has_gone_is_an_error(shared):
    """For who waits for rows, and for who waits for a place."""
    sender, receiver = shared
    sender.close()
    with pytest.raises(links.LinkError, match="has gone"):
        receiver.receive(torch.empty(1, 4))


def test_ipc_orders_the_streams_of_both_sides():
    """A place is written once it was read, and read once it was written: by events, in this order, on each side."""
    log = []

    class Event:
        def __init__(self, name):
            self.name = name

        def wait(self):
            log.append(("wait", self.name))

        def record(self):
            log.append(("record", self.name))

    here, there = socket.socketpair()
    places = torch.zeros(PLACES, PIECE, 4)
    full = [Event(f"full {i}") for i in range(PLACES)]
    free = [Event(f"free {i}") for i in range(PLACES)]
    sender, receiver = Ipc(here, places, full, free), Ipc(there, places, full, free)
    rows, got = torch.rand(PLACES + 2, 4), torch.zeros(PLACES + 2, 4)
    for i in range(len(rows)):
        sender.send(rows[i : i + 1])
        receiver.receive(got[i : i + 1])
    assert torch.equal(rows, got)
    assert log[:8] == [
        ("wait", "free 0"), ("record", "full 0"), ("wait", "full 0"), ("record", "free 0"),
        ("wait", "free 1"), ("record", "full 1"), ("wait", "full 1"), ("record", "free 1"),
    ]  # fmt: skip
    assert log[4 * PLACES :][:4] == log[:4]  # the first place again
    sender.close()
    receiver.close()

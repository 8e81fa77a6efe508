"""Four processes with a stage each give the tokens of the unsplit model; no MPI."""

import pytest
import torch
import transformers

from decoder import selfcheck
from decoder.convert import prepare
from decoder.processes import Pipeline
from decoder.reference import generate, load
from decoder.spec import resolve
from decoder.text import Text

TOKENS = {"smollm2": 12, "qwen3-random:tiny": 24}
FEW = TOKENS["qwen3-random:tiny"]
IN_FLIGHT = [(1, 1), (4, 1), (2, 2)]  # microbatches under way, requests in each


@pytest.fixture(scope="module")
def pipeline():
    """Four stage processes for all tests of this module, which must end cleanly."""
    with Pipeline(4) as running:
        yield running
    assert running.exitcodes == [0, 0, 0, 0]


@pytest.fixture(scope="module")
def expected():
    """Return what each model answers unsplit: specification, prompts, tokens."""
    known = {}

    def answer(model):
        if model not in known:
            spec = prepare(model)
            prompts = [Text(spec).encode(prompt) for prompt in selfcheck.PROMPTS]
            known[model] = spec, prompts, generate(load(spec), prompts, TOKENS[model])
        return known[model]

    return answer


def tokens(requests):
    """Return the tokens of each request."""
    return [request.tokens for request in requests]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", ["smollm2", "qwen3-random:tiny"])
def test_tokens_equal_those_of_the_unsplit_model(pipeline, expected, model):
    """At 1 and at 4 requests in flight, alone and in batches, with logits as payload, every token is the same."""
    spec, prompts, answers = expected(model)
    pipeline.open(spec, payload="logits")
    for in_flight, batch in IN_FLIGHT if model != "smollm2" else IN_FLIGHT[:2]:
        assert tokens(pipeline.run(prompts, TOKENS[model], in_flight=in_flight, batch=batch)) == answers
    assert pipeline.wrong == 0
    assert [figure["cached"] for figure in pipeline.figures()] == [0, 0, 0, 0]  # finished requests are released


@pytest.mark.timeout(300)
def test_smollm2_answers_in_words(expected):
    """The real weights are really read: the text is right, and ends by itself."""
    spec, _, answers = expected("smollm2")
    assert Text(spec).decode(answers[0]) == "The capital of France is Paris."


def test_random_weights_make_tokens_that_depend_on_the_whole_prompt(expected):
    """The comparison can tell models apart: answers vary, and change with a prompt's first token."""
    spec, prompts, answers = expected("qwen3-random:tiny")
    assert all(len(set(answer)) > 3 for answer in answers)
    changed = generate(spec, [[(prompt[0] + 1) % spec.vocabulary, *prompt[1:]] for prompt in prompts], FEW)
    assert all(one != other for one, other in zip(changed, answers, strict=True))


def test_one_stage_of_another_model_changes_the_tokens(pipeline, expected):
    """Negative control: with one wrong stage the comparison fails, from the first tokens on."""
    spec, prompts, answers = expected("qwen3-random:tiny")
    pipeline.open([spec, spec, resolve("qwen3-random:tiny", seed=1), spec], payload=4096)
    wrong = tokens(pipeline.run(prompts, FEW, in_flight=4))
    assert all(one[:4] != other[:4] for one, other in zip(wrong, answers, strict=True))
    assert pipeline.wrong == 0  # what was sampled still arrived as it was


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_directory_gives_the_tokens_of_transformers(pipeline, tmp_path, family, tied):
    """A checkpoint written by save_pretrained, in several files, of both families, tied and not."""
    config = getattr(transformers, f"{family}Config")(
        hidden_size=48, intermediate_size=96, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2,
        head_dim=12, vocab_size=300, max_position_embeddings=512, tie_word_embeddings=tied, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(5)
    whole = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    whole.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    prompts = [[1, 2, 3], [250, 40], [7] * 9, list(range(20, 60))]
    answers = generate(whole, prompts, FEW)
    assert len({tuple(answer) for answer in answers}) == 4
    pipeline.open(resolve(str(tmp_path)), payload="none")
    assert tokens(pipeline.run(prompts, FEW, in_flight=4)) == answers
    assert generate(str(tmp_path), prompts, FEW) == answers


def test_bfloat16_runs_with_the_tokens_of_the_unsplit_bfloat16_model(pipeline, expected):
    """The stages' dtype is the caller's; activations cross the wire in it."""
    spec, prompts, _ = expected("qwen3-random:tiny")
    pipeline.open(spec, dtype="bfloat16")
    assert tokens(pipeline.run(prompts, FEW, in_flight=2)) == generate(spec, prompts, FEW, dtype="bfloat16")


def test_selfcheck_refuses_more_stages_than_layers(capsys):
    """The command says so in one line and with exit code 2."""
    assert selfcheck.main(["--model", "qwen3-random:tiny", "--stages", "9"]) == 2
    assert capsys.readouterr().err.count("\n") == 1

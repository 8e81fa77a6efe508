"""The performance case without ranks: its id, engines, verdict, evidence, pictures and trtllm-bench's side."""

import gzip
import json
import queue
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

import pipeline
from case import engines, figure, judge, names, pictures, relays, trtllm
from case.evidence import hops, overlap, subtract, summarise, union
from case.ids import FORM, PUBLISHED, CaseError, parse, scaled
from case.measure import RankNotes, Run, groups
from case.record import Notes
from case.report import print_result
from trtllm_pp_progress.pyexecutor.shape import recognise
from trtllm_pp_progress.tools.bench.measure import clean_up_at_rest
from verdict import FAILED, INCONCLUSIVE, PASSED, THRESHOLD, Verdict, of_code


@pytest.mark.parametrize("text", [PUBLISHED, f"test_perf[{PUBLISHED}]", f"[{PUBLISHED}]", f" {PUBLISHED} "])
def test_the_published_id_is_read_and_written_again(text):
    """With and without the brackets that a node id has."""
    case = parse(text)
    assert (case.model, case.dtype, case.max_batch, case.max_tokens) == ("qwen3_0.6b", "bfloat16", 512, 2048)
    assert (case.input_len, case.output_len, case.requests, case.concurrency) == (8000, 1000, 256, 1)
    assert (case.pp, case.gpus, case.id) == (4, 4, PUBLISHED)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("qwen3_0.6b", "llama"),
        ("bench", "perf"),
        ("pytorch", "cpp"),
        ("bfloat16", "fp8"),
        ("maxbs:512", "maxbs:0"),
        ("maxbs:512", "maxbs:1,2"),
        ("maxnt:2048", "maxnt:2k"),
        ("input_output_len:8000,1000", "input_output_len:8000"),
        ("input_output_len:8000,1000", "input_output_len:8000,x"),
        ("reqs:256", "requests:256"),
        ("con:1", "con:-1".replace("-", "_")),
        ("pp:4", "pp:1"),
        ("gpus:4", "gpus:6"),
        ("gpus:4", "gpus:8"),
    ],
)
def test_a_bad_part_is_named_with_the_valid_form(good, bad):
    """One line: the part, what it should be, the whole form."""
    with pytest.raises(CaseError) as refused:
        parse(PUBLISHED.replace(good, bad, 1))
    assert "\n" not in str(refused.value)
    assert repr(bad) in str(refused.value)
    assert FORM in str(refused.value)


@pytest.mark.parametrize("text", ["", "test_perf", PUBLISHED + "-ep:2", PUBLISHED.rpartition("-")[0]])
def test_another_number_of_parts_is_refused(text):
    """Nothing is guessed."""
    with pytest.raises(CaseError, match="parts instead of 11"):
        parse(text)


def test_what_is_scaled_is_said():
    """Each reduction is in the list, and nothing that was not reduced."""
    case = parse(PUBLISHED.replace("con:1", "con:8"))
    run, said = scaled(case, 0.01, 4, 200)
    assert (run.input_len, run.output_len, run.requests, run.concurrency) == (80, 200, 4, 4)
    assert said == [
        "input 80 instead of 8000",
        "output 200 instead of 1000",
        "requests 4 instead of 256",
        "concurrency 4 instead of 8",
    ]
    assert scaled(case) == (case, [])


@pytest.mark.parametrize("arguments", [(0,), (1.5,), (float("nan"),), (1, 257), (1, 0), (1, 1, 1001)])
def test_a_scale_that_enlarges_is_refused(arguments):
    """The case is the limit."""
    with pytest.raises(CaseError, match="is not valid"):
        scaled(parse(PUBLISHED), *arguments)


@pytest.mark.parametrize(
    ("gpus", "installed", "best"),
    [(4, True, "trtllm"), (3, True, "host-gpu"), (1, False, "host-gpu"), (0, True, "host-cpu"), (0, False, "host-cpu")],
)
def test_the_best_engine_present_is_chosen(gpus, installed, best):
    """TensorRT-LLM needs all its GPUs, the host one."""
    assert engines.choose("auto", parse(PUBLISHED), engines.Machine(gpus, installed)) == best


def test_an_engine_that_is_not_there_is_refused():
    """With what is missing; the CPU is always there."""
    nothing = engines.Machine(0, False)
    with pytest.raises(CaseError, match="tensorrt_llm is not installed, 0 of 4 GPUs are here"):
        engines.choose("trtllm", parse(PUBLISHED), nothing)
    with pytest.raises(CaseError, match="torch finds no GPU"):
        engines.choose("host-gpu", parse(PUBLISHED), nothing)
    with pytest.raises(CaseError, match="'gpu': valid ones are auto, trtllm, host-gpu, host-cpu"):
        engines.choose("gpu", parse(PUBLISHED), nothing)
    assert engines.choose("host-cpu", parse(PUBLISHED), nothing) == "host-cpu"


@pytest.mark.parametrize(
    ("concurrency", "pp", "batch"), [(1, 4, 1), (8, 4, 2), (32, 4, 8), (8, 2, 4), (5, 4, 1), (6, 4, 2), (3, 2, 1)]
)
def test_batches_are_equal_and_fill_the_pipeline(concurrency, pp, batch):
    """A batch of another size would round otherwise in bfloat16."""
    assert groups(concurrency, pp) == batch
    assert concurrency % batch == 0


def rows(regressed=60.0, flush=100.0, patched=99.0, kernels=(1.0, 1.0, 1.0)):
    """Return one run of each, with the figures a verdict looks at."""
    rates = {"regressed": regressed, "flush": flush, "patched": patched}
    pairs = zip(rates.items(), kernels, strict=True)
    return {name: [{"tokens_per_s": rate, "kernel_ms": [ms / 2, ms / 2]}] for (name, rate), ms in pairs}


def test_the_published_figures_pass_and_their_faults_fail():
    """Upstream's own numbers on each side of its threshold."""
    published = rows(regressed=177.08, flush=269.29, patched=270.55)
    assert judge.against_threshold(published, kernels=True) == Verdict()
    assert abs(THRESHOLD - 223.19 / 269.29) < 0.002
    slow = judge.against_threshold(rows(regressed=177.08, flush=269.29, patched=223.0), kernels=True)
    assert len(slow.failures) == 1
    assert "patched is 223.00 tokens/s, below the threshold of 223.51" in slow.failures[0]
    assert slow.inconclusive == []


def test_a_run_that_cannot_detect_is_inconclusive():
    """Regressed above the threshold, or so near below it that noise decides: neither passed nor failed."""
    for rate in (100.0, 83.0, 79.0):
        found = judge.against_threshold(rows(regressed=rate), kernels=False)
        assert "this run detects nothing" in found.inconclusive[0]
        assert (found.failures, found.code, found.word) == ([], INCONCLUSIVE, "inconclusive")
    assert judge.against_threshold(rows(regressed=78.0), kernels=False) == Verdict()


def test_a_failure_counts_even_where_nothing_could_be_detected():
    """Patched below the threshold is a failure whatever regressed did."""
    found = judge.against_threshold(rows(regressed=100.0, patched=50.0), kernels=False)
    assert (found.code, found.word) == (FAILED, "failed")
    assert [line.partition(":")[0] for line in found.lines("PASSED")] == ["FAILED", "INCONCLUSIVE"]


@pytest.mark.parametrize(
    ("patched", "word"), [(104.0, "passed"), (102.0, "inconclusive"), (98.0, "inconclusive"), (96.0, "failed")]
)
def test_without_a_good_build_patched_has_to_be_the_faster_one(patched, word):
    """Where both are the same nothing parked, and nothing is proven."""
    assert judge.without_good(100.0, patched).word == word


@pytest.mark.parametrize(("code", "word"), [(0, "passed"), (1, "failed"), (3, "inconclusive"), (124, "failed")])
def test_the_ranks_exit_code_is_the_verdict(code, word):
    """Whoever started the ranks ends as they did; a deadline is a failure."""
    assert of_code(code).word == word


@pytest.mark.parametrize(
    ("rates", "recovery", "code"),
    [
        ((60.0, 100.0, 99.0), True, PASSED),
        ((60.0, 100.0, 80.0), True, FAILED),
        ((90.0, 100.0, 99.0), True, INCONCLUSIVE),
        ((90.0, 100.0, 50.0), True, FAILED),
        ((90.0, 100.0, 50.0), False, PASSED),
    ],
)
def test_the_demo_judges_recovery(rates, recovery, code, capsys):
    """Where the regressed relay is above the threshold the run proves nothing; and only if it was asked to judge."""
    measured = [
        SimpleNamespace(policy=policy, tokens_per_s=rate, wrong=0)
        for policy, rate in zip(("regressed", "flush", "patched"), rates, strict=True)
    ]
    tokens = {row.policy: [SimpleNamespace(tokens=[[1, 2]])] for row in measured}
    assert pipeline.judge(measured, tokens, [[1, 2]], recovery).code == code
    assert "Tokens are those of the unsplit model" in capsys.readouterr().out
    tokens["patched"].append(SimpleNamespace(tokens=[[1, 3]]))
    wrong = pipeline.judge(measured, tokens, [[1, 2]], recovery)
    assert wrong.failures == ["tokens are not the unsplit model's with patched; 0 wrong payloads"]


def in_rounds(**rates):
    """Return rows with one run a round of each policy."""
    return {name.replace("_", "-").replace("-patch", "+patch"): [{"tokens_per_s": rate} for rate in of_policy]
            for name, of_policy in rates.items()}  # fmt: skip


@pytest.mark.parametrize(
    ("patched", "word"),
    [
        ([100, 101, 99, 100], "passed"),
        ([98, 98, 97, 98], "failed"),
        ([98, 98, 97, 103], "inconclusive"),
        ([98], "failed"),
    ],
)
def test_each_relay_is_judged_beside_itself_without_the_patch(patched, word):
    """The median of the rounds' ratios; inconclusive where a quarter of the rounds is not below."""
    pair = in_rounds(inline_g=[100.0] * len(patched), inline_g_patch=patched, flush=[500.0] * len(patched))
    found = judge.no_harm(pair)
    assert found.word == word
    assert all(line.startswith("inline-g+patch is 0.9") for line in found.failures + found.inconclusive)


def test_pairs_are_compared_within_a_round():
    """A machine that became slower does not count for or against anybody."""
    pair = in_rounds(regressed=[100.0, 50.0, 10.0], patched=[110.0, 55.0, 11.0], native=[1.0] * 3)
    assert judge.in_pairs(pair) == {"patched": pytest.approx((1.1, 1.1, 1.1))}


def test_every_relay_is_recognised_as_its_era():
    """So that the patch does to each what it does to upstream's; the burst of #14850 is left alone."""
    assert tuple(relays.RELAYS) == names.RELAY_NAMES
    eras = {name: recognise(relays.RELAYS[name]).era for name in names.RELAY_NAMES}
    assert eras == {
        "regressed": "E2", "flush": "C", "oneshot": "unknown", "iprobe": "H", "native": "I",
        "inline-f": "F", "inline-g": "G", "inline-h": "H", "inline-i": "I",
    }  # fmt: skip
    assert set(names.POLICY_NAMES) == {
        "patched",
        *eras,
        *(f"{n}+patch" for n in eras if n not in ("regressed", "oneshot")),
    }
    for policy in names.POLICY_NAMES:
        cls = relays.relay_class(policy)
        assert issubclass(cls, relays.RELAYS[names.unpatched(policy)])
        assert issubclass(cls, relays.Recorded) != names.is_patched(policy)


def test_unequal_gpu_time_fails_on_a_gpu_alone():
    """3 % apart is not the same work; on a CPU, ranks that wait take each other's time."""
    unequal = judge.against_threshold(rows(kernels=(1.0, 1.04, 1.0)), kernels=True)
    assert "differs by 4.0%" in unequal.failures[0]
    assert judge.against_threshold(rows(kernels=(1.0, 1.04, 1.0)), kernels=False) == Verdict()
    assert judge.against_threshold(rows(kernels=(1.0, 1.02, 1.0)), kernels=True) == Verdict()


def test_tokens_are_held_against_the_unsplit_model_and_each_other():
    """One wrong token anywhere, or a wrong sample state, and the policy is named."""
    good = [[1, 2, 3], [4, 5, 6]]
    same = {"flush": [good], "patched": [good, good]}
    assert judge.token_failures(same, [[1, 2]], {"flush": 0}) == []
    assert judge.token_failures(same, [], {}) == []
    assert judge.token_failures(same, [[1, 9]], {}) == [
        "flush: tokens are not the unsplit model's",
        "patched: tokens are not the unsplit model's",
    ]
    late = {"flush": [good], "patched": [good, [[1, 2, 3], [4, 5, 7]]]}
    assert judge.token_failures(late, [[1, 2]], {}) == ["patched: tokens are not those of the other relays"]
    assert judge.token_failures(same, [], {"patched": 2}) == ["patched: 2 wrong sample states"]


def test_spans():
    """Union, overlap and difference of spans, at their edges."""
    assert union([(3, 4), (0, 1), (0.5, 2), (2, 2.5)]) == [(0, 2.5), (3, 4)]
    assert overlap([(0, 2), (3, 5)], [(1, 4), (4.5, 6)]) == [(1, 2), (3, 4), (4.5, 5)]
    assert subtract([(0, 10)], [(-1, 1), (2, 3), (9, 12)]) == [(1, 2), (3, 9)]
    assert subtract([(0, 1), (5, 6)], []) == [(0, 1), (5, 6)]
    assert subtract([(2, 3)], [(0, 1), (1, 2.5), (2.7, 2.8)]) == [(2.5, 2.7), (2.8, 3)]
    assert subtract([(2, 3)], [(1, 4)]) == []


PERIOD, STEPS = 0.010, 12


def made_up(policy="regressed", tokens_per_s=100.0):
    """Return a run of four ranks, all times known: a step of 10 ms has 4 of forward, 2 of parked and 2 of wire."""
    notes = [Notes() for _ in range(4)]
    spans = [{0: (0.0, 0.001, False)} for _ in range(4)]
    for step in range(1, STEPS + 1):
        start = step * PERIOD
        for rank in range(4):
            spans[rank][step] = (start + rank * 1e-3, start + rank * 1e-3 + 1e-3, True)
            notes[rank].host[step] = (start - 0.5e-3, start)
        at = start + 4e-3
        for sender, receiver, parked, wire in ((3, 0, 0.0, 1e-3), (0, 1, 1e-3, 0.5e-3), (1, 2, 1e-3, 0.5e-3)):
            notes[sender].posted[step] = at
            notes[receiver].receiving[step] = at - 1e-3
            notes[sender].inside.append((at + parked, at + parked + wire))
            at += parked + wire
            notes[receiver].received[step] = at
    ranks = [RankNotes(notes[i], spans[i], [0.001] * 3, 0.001, 0.5, 10, STEPS, 0) for i in range(4)]
    count = round(tokens_per_s * (STEPS + 2) * PERIOD)
    return Run(policy, (0.0, (STEPS + 2) * PERIOD), [[0] * count], 100, ranks)


def test_a_step_is_divided_into_what_was_put_in():
    """Computing 4 ms, parked 2, wire 2, idle 2 of 10; the last step has no end to be idle before."""
    summary = summarise(made_up())
    length = (STEPS - 1) * PERIOD + 8e-3
    assert summary["steps"] == STEPS
    assert summary["step_ms_p50"] == pytest.approx(10)
    assert summary["kernel_ms"] == [pytest.approx(1)] * 4
    for part, seconds in (("compute", 4e-3), ("parked", 2e-3), ("wire", 2e-3)):
        assert summary["shares"][part] == pytest.approx(STEPS * seconds / length, abs=1e-3)
    assert sum(summary["shares"].values()) == pytest.approx(1, abs=1e-3)
    assert summary["transfer_ms"]["3->0"]["p50"] == pytest.approx(1, abs=1e-3)
    assert summary["transfer_ms"]["0->1"]["p50"] == pytest.approx(1.5, abs=1e-3)
    assert summary["tokens_per_s"] == pytest.approx(100)


def test_a_hop_is_parked_until_its_sender_is_inside_mpi():
    """And not while the receiver has not asked, nor where the sender was inside before the post."""
    run = made_up()
    ring = hops(run)[3]
    assert [hop["from"] for hop in ring] == [3, 0, 1]
    assert [sum(b - a for a, b in hop["parked"]) for hop in ring] == pytest.approx([0, 1e-3, 1e-3])
    assert [hop["driven"] - hop["posted"] for hop in ring] == pytest.approx([0, 1e-3, 1e-3])
    late = run.ranks[1].notes
    late.receiving[3] = late.received[3] - 0.1e-3
    assert hops(run)[3][1]["parked"] == []
    run.ranks[0].notes.inside.append((0.0, 1.0))
    assert all(hop["parked"] == [] for step, of_step in hops(run).items() for hop in of_step if hop["from"] == 0)


def test_too_short_a_run_is_refused():
    """Medians of two steps would be read as figures."""
    run = made_up()
    run.window = (0.0, 2.5 * PERIOD)
    with pytest.raises(ValueError, match="at least 3 are needed"):
        summarise(run)


@pytest.fixture
def written(tmp_path):
    """Return the path of a result with two policies."""
    runs = {policy: [summarise(made_up(policy))] for policy in ("regressed", "patched")}
    path = tmp_path / "result.json"
    fields = {"case": PUBLISHED, "model": "m", "pp": 4, "engine": "host-cpu", "link": "shared", "transport": "tcp"}
    path.write_text(json.dumps({**fields, "host_work_ms": 0.7, "scaled": ["x instead of y"], "rows": runs}))
    return path


def test_the_text_shows_who_waits_for_whom(written):
    """Ranks compute one after another, and a parked hop is in its sender's lane."""
    done = CliRunner().invoke(pictures.command, [str(written)])
    assert done.exit_code == 0, done.output
    lines = [line for line in done.output.splitlines() if line.startswith("  rank")]
    assert len(lines) == 8
    assert [line.index("#") for line in lines[:4]] == sorted(line.index("#") for line in lines[:4])
    assert ["!" in line for line in lines[:4]] == [True, True, False, False]
    assert ["=" in line for line in lines[:4]] == [True, True, False, True]
    assert "x instead of y" in done.output


def test_the_picture_and_the_trace_are_written(written, tmp_path):
    """A PNG of some size; a trace whose flows have both their ends and whose spans are not negative."""
    png, trace = tmp_path / "ring.png", tmp_path / "ring.json.gz"
    done = CliRunner().invoke(pictures.command, [str(written), "--png", str(png), "--trace", str(trace)])
    assert done.exit_code == 0, done.output
    assert png.read_bytes().startswith(b"\x89PNG")
    assert png.stat().st_size > 20_000
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert {event["ph"] for event in events} == {"X", "M", "s", "f"}
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    assert min(event["ts"] for event in events if "ts" in event) == 0
    flows = {kind: sorted(event["id"] for event in events if event["ph"] == kind) for kind in "sf"}
    assert flows["s"] == flows["f"]
    assert len(flows["s"]) == len(set(flows["s"])) == 2 * 3 * STEPS
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {f"{policy}, rank {rank}" for policy in ("regressed", "patched") for rank in range(4)}


def test_the_result_is_printed_with_each_pair(capsys):
    """A column for the ratio to flush, one for the ratio to the same relay without the patch, and the verdict."""
    runs = {policy: [summarise(made_up(policy, rate))] * 2 for policy, rate in
            {"flush": 100.0, "inline-g": 50.0, "inline-g+patch": 100.0}.items()}  # fmt: skip
    written = {
        "environment": {"cores": 2}, "case": PUBLISHED, "scaled": [], "engine": "host-cpu", "model": "m", "pp": 4,
        "link": "shared", "batch": 1, "payload_bytes": 10, "host_work_ms": 0.0, "hold_gil": True, "rows": runs,
        "judged": ["a line that does not count"], "compared_tokens": 7,
    }  # fmt: skip
    print_result(written, Verdict(inconclusive=["nothing parked"]))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "# cores 2"
    assert "not judged here: a line that does not count" in lines
    assert lines[-1] == "INCONCLUSIVE: nothing parked"
    (row,) = [line for line in lines if line.startswith("inline-g+patch") and "(" in line]
    assert row.split()[1:5] == ["100.00", "1.000", "2.000", "(2.000-2.000)"]


def test_a_file_that_is_no_result_is_refused(tmp_path):
    """And a policy that was not run."""
    other = tmp_path / "other.json"
    other.write_text('{"rows": []}')
    assert "is no result of perf/test_perf.py" in CliRunner().invoke(pictures.command, [str(other)]).output


def test_a_policy_that_was_not_run_is_refused(written):
    """With those that were."""
    output = CliRunner().invoke(pictures.command, [str(written), "--policies", "flush"]).output
    assert "no policy 'flush' in this result: it has regressed, patched" in output


def test_the_example_is_a_step_of_usual_length():
    """Not the longest one, which would be an exaggeration."""
    summary = summarise(made_up())
    step, after = figure.example(summary)
    assert after["step"] == step["step"] + 1


REPORT = {"engine": {}, "performance": {"request_throughput_req_s": 0.27, "system_output_throughput_tok_s": 270.55}}
PRINTED = """
===========================================================
= PERFORMANCE OVERVIEW
===========================================================
Request Throughput (req/sec):                     0.2706
Total Output Throughput (tokens/sec):             1,270.5500
Total Token Throughput (tokens/sec):              2434.9
"""


def test_a_report_is_read_from_json_or_from_what_was_printed(tmp_path):
    """The file first; neither is an error that says what was looked for."""
    report = tmp_path / "report.json"
    assert trtllm.read_report(report, PRINTED) == 1270.55
    report.write_text(json.dumps(REPORT))
    assert trtllm.read_report(report, PRINTED) == 270.55
    report.write_text("{}")
    with pytest.raises(trtllm.ReportError, match=r"no performance\.system_output_throughput_tok_s"):
        trtllm.read_report(report, PRINTED)
    with pytest.raises(trtllm.ReportError, match="no 'Total Output Throughput' among 5 characters"):
        trtllm.read_report(tmp_path / "none.json", "hello")


def test_command_lines_say_what_the_case_says(tmp_path):
    """Every number of the id is in the benchmark's line, and the requests are of exact lengths."""
    prepare, bench = trtllm.commands(parse(PUBLISHED), tmp_path, Path("/models/qwen"))
    for option, value in {
        "--pp": "4", "--tp": "1", "--max_batch_size": "512", "--max_num_tokens": "2048", "--concurrency": "1",
        "--num_requests": "256", "--backend": "pytorch", "-n": "4", "--model_path": "/models/qwen",
        "--model": "Qwen/Qwen3-0.6B",
    }.items():  # fmt: skip
        assert bench[bench.index(option) + 1] == value
    for option, value in {"--input-mean": "8000", "--output-mean": "1000", "--output-stdev": "0"}.items():
        assert prepare[prepare.index(option) + 1] == value
    assert prepare[prepare.index("--output") + 1] == bench[bench.index("--dataset") + 1]
    assert "--model_path" not in trtllm.commands(parse(PUBLISHED), tmp_path)[1]


@pytest.mark.parametrize("code", [0, 3])
def test_both_variants_are_run_through_a_stand_in(tmp_path, monkeypatch, code):
    """A stand-in for mpirun and trtllm-bench sees the switch; its failure is shown with what it printed."""
    for name in ("mpirun", "trtllm-bench"):
        script = tmp_path / name
        script.write_text(
            f'#!/bin/sh\necho "Total Output Throughput (tokens/sec): 10$TRTLLM_PP_PROGRESS"\nexit {code}\n'
        )
        script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if code:
        (tmp_path / "trtllm-bench").write_text("#!/bin/sh\n")
        with pytest.raises(trtllm.ReportError, match="ended with 3"):
            trtllm.run(parse(PUBLISHED), tmp_path, None, 1, 30)
    else:
        found = trtllm.run(parse(PUBLISHED), tmp_path, None, 2, 30)
        assert found == {"regressed": [{"tokens_per_s": 100.0}] * 2, "patched": [{"tokens_per_s": 101.0}] * 2}


def test_the_cleanup_comes_once_the_relay_is_back_at_its_queue():
    """While the relay is in its last flush the executor thread does not wait for its request too. Control: as it is."""

    def ended(settled):
        order, entered, leave = [], threading.Event(), threading.Event()

        class Executor:
            executed_batch_queue = queue.Queue()
            looks = 0

            @property
            def error(self):
                self.looks += 1
                if self.looks == 3:
                    leave.set()

            def _executor_loop_cleanup(self):
                order.append("cleanup")
                leave.set()

            def relay(self):
                while (batch := self.executed_batch_queue.get()) is not None:
                    entered.set()
                    assert leave.wait(30)
                    order.append(batch)

        executor = Executor()
        executor.executed_batch_queue.put("flush")
        executor.broadcast_sample_state_handler = relay = threading.Thread(target=executor.relay)
        relay.start()
        assert entered.wait(30)
        if settled:
            clean_up_at_rest(executor)
        executor._executor_loop_cleanup()
        executor.executed_batch_queue.put(None)
        relay.join(30)
        return order

    assert ended(settled=True) == ["flush", "cleanup"]
    assert ended(settled=False) == ["cleanup", "flush"]

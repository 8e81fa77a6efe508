"""The perf scripts without a GPU: command lines, parsing, redaction, the modelled pipe, and the tables."""

from __future__ import annotations

import getpass
import json
import socket

import pytest

from receive import ab, model, overhead, residency, residency_rows
from trtllm_pp_progress.vllm import uninstall


class TestAB:
    """The recipe for users."""

    def test_the_arms_differ_in_the_policy_alone(self, capsys):
        """Every round runs three arms at both lengths with one command line, prefix cache off."""
        assert ab.main(["--model", "m", "--pp", "4", "--rounds", "1", "--dry-run"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 6
        assert len({line.partition("vllm ")[2].replace("output-len 2", "output-len 1") for line in lines}) == 1
        assert all("--no-enable-prefix-caching" in line and "--async-scheduling" in line for line in lines)
        assert [line.split()[0].partition("=")[2] for line in lines[:3]] == ["off", "2", "rank-aware"]

    def test_the_arms_are_settings(self):
        """What an arm puts into the environment is what the package takes."""
        from trtllm_pp_progress.vllm.settings import load_settings

        found = [load_settings(arm.environment) for arm in ab.arms(4)]
        assert [settings.receive for settings in found] == ["off", 2, "rank-aware"]

    def test_the_command_is_one_that_vllm_takes(self):
        """Each long option appears in the installed vLLM's sources."""
        from pathlib import Path

        import vllm

        options = ab.options_from(["--model", "m", "--pp", "4"])
        folder = Path(vllm.__file__).parent
        sources = "".join(
            path.read_text()
            for path in (
                folder / "benchmarks/throughput.py",
                folder / "benchmarks/datasets/datasets.py",
                folder / "engine/arg_utils.py",
            )
        )
        for word in ab.command(options, 1, "x"):
            if word.startswith("--"):
                assert word.replace("--no-", "--") in sources, word

    @pytest.mark.parametrize("arguments", [["--pp", "1"], ["--pp", "4", "--rounds", "0"], ["--pp", "x"], []])
    def test_a_bad_command_line(self, arguments):
        """It ends with argparse's own error."""
        with pytest.raises(SystemExit, match="2"):
            ab.options_from(["--model", "m", *arguments])

    def run(self, arm, tokens, rate, posts=10):
        """Return one run, parsed from what vLLM would have written."""
        counters = {"posts": posts, "fallbacks": 0, "waited": {"total_ms": 2.5}}
        lines = [
            "(Worker) INFO x.py:1] receive policy at shutdown: "
            + json.dumps({"rank": rank, "role": role, "counters": counters})
            for rank, role in ((3, "source"), (0, "receiver"))
        ]
        results = json.dumps({"requests_per_second": rate, "tokens_per_second": rate * 600, "elapsed_time": 1})
        return ab.parse(arm, tokens, results, "\n".join(["noise", *(lines if posts else [])]))

    def test_results_and_counters_are_read(self):
        """Workers come out by rank; a stock run has none."""
        found = self.run("post-model", 2, 5.0)
        assert [worker["rank"] for worker in found.workers] == [0, 3]
        assert self.run("immediate", 2, 5.0, posts=0).workers == []

    @pytest.mark.parametrize("results", ["", "[]", "{}", '{"requests_per_second": null, "tokens_per_second": 1}'])
    def test_a_run_without_results_is_an_error(self, results):
        """It names the arm rather than counting as zero."""
        with pytest.raises(ValueError, match="immediate, max_tokens 1"):
            ab.parse("immediate", 1, results, "")

    def test_the_comparison(self):
        """Gains are against immediate at the same length, by medians."""
        runs = [self.run("immediate", 2, rate, posts=0) for rate in (9.0, 10.0, 30.0)]
        runs += [self.run("post-model", 2, rate) for rate in (11.0, 12.0, 13.0)]
        lines = ab.compare(runs).splitlines()
        assert lines[2].split() == ["2", "post-model", "12.00", "+20.0%", "16.7%", "30", "0", "7.5"]

    @pytest.mark.parametrize(
        "secret",
        [
            "10.1.2.3",
            "192.168.0.7:8000",
            "fe80::1ff:fe23:4567:890a",
            "/home/someone/models/x.bin",
            "~/secret/place",
            "hf_abcdefghijklmnop",
            "sk-abcdefghijklmnop",
            "https://user:pass@example.com/x",
            "me@example.com",
        ],
    )
    def test_redaction(self, secret):
        """Addresses, paths, keys and links go; what describes the machine stays."""
        text = ab.redact(f"GPU 0: NVIDIA H200 at {secret}, driver 580.159.03, torch 2.13.0+cu130")
        assert secret not in text
        assert "NVIDIA H200" in text
        assert "580.159.03" in text
        assert "2.13.0+cu130" in text

    def test_redaction_of_names_and_named_secrets(self, monkeypatch):
        """Host and user go wherever they stand, and whatever a secret's name introduces."""
        monkeypatch.setattr(socket, "gethostname", lambda: "node17.cluster")
        monkeypatch.setattr(getpass, "getuser", lambda: "someone")
        text = ab.redact("node17 node17.cluster someone\nHF_TOKEN=abc\nmy_api_key: def\nPASSWORD=ghi")
        assert not {"node17", "someone", "abc", "def", "ghi"} & set(text.replace("=", " ").split())


class TestModel:
    """The model on paper."""

    def test_pp2_gains_nothing_before_the_model(self):
        """Pre-model delay 1 is immediate, by residency and throughput; post-model is not."""
        before, after, now = (
            model.simulate(model.Pipe(model.policies(2)[name], model.forward(2)))
            for name in ("pre-model 1", "post-model 1", "immediate")
        )
        assert before == now
        assert after.residency[0] < 0.05 < 0.9 < now.residency[0]
        assert after.throughput > 1.1 * now.throughput

    @pytest.mark.parametrize("pp", [2, 3, 4, 8, 16])
    @pytest.mark.parametrize("reverse", [False, True])
    def test_rank_aware_never_loses(self, pp, reverse):
        """Whatever the chain's order, it is faster than vLLM as it is, with next to no receive resident and no wait."""
        order = model.forward(pp)[:: -1 if reverse else 1]
        aware = model.simulate(model.Pipe(model.policies(pp)["rank-aware"], order, steps=120))
        now = model.simulate(model.Pipe(model.policies(pp)["immediate"], order, steps=120))
        assert aware.throughput > 1.08 * now.throughput
        assert max(aware.residency) < 0.35 * max(now.residency)
        assert max(aware.waited) < 0.05

    def test_a_common_delay_can_cost_more_than_it_saves(self):
        """On a chain against the pipeline one delay for all stalls the feedback: why it is not the default."""
        slow = model.simulate(model.Pipe(model.policies(4)["post-model 3"], model.forward(4)[::-1]))
        assert slow.throughput < 0.5
        assert max(slow.waited) > 1

    def test_without_interference_nothing_is_gained(self):
        """A receive that disturbs nobody can stay."""
        now = model.simulate(model.Pipe((0, 0, 0), model.forward(4), interference=0.0))
        aware = model.simulate(model.Pipe((3, 2, 1), model.forward(4), interference=0.0))
        assert aware.throughput == pytest.approx(now.throughput, abs=0.01)

    def test_the_table_says_what_it_is(self, capsys):
        """The first word about its figures is that they are modelled."""
        assert model.main(["--pp", "4", "--steps", "60"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert "modelled, not measured" in lines[0]
        assert len(lines) == 2 + 2 * 4


class TestResidency:
    """The GPU script, up to the GPU."""

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--pp", "1"],
            ["--rank", "3"],
            ["--ready", "0"],
            ["--ready", "1.5"],
            ["--steps", "1"],
            ["--rounds", "0"],
            ["--ctas", "0"],
            ["--ctas", "65"],
            ["--loads", "x"],
            ["--connections", "2"],
        ],
    )
    def test_a_bad_command_line(self, arguments):
        """It ends with argparse's own error."""
        with pytest.raises(SystemExit, match="2"):
            residency.options_from(arguments)

    def test_without_a_gpu_it_says_so(self, capsys):
        """The answer is one line and 2, not a traceback."""
        assert residency.main([]) == 2
        assert "receive-residency: needs" in capsys.readouterr().err

    def row(self, arm, **more):
        """Return a row of a measurement that meets every threshold."""
        values = dict(
            load="decode",
            arm=arm,
            ctas=1,
            connections="default",
            pp=4,
            step_ms=4.0,
            model_ms=4.0,
            resident_ms=4.0 if arm == "immediate" else 0.01,
            share=0.0,
            wait_ms=0.0,
            wrong=0,
            age=0.0,
        )
        return residency_rows.Row(**{**values, **more})

    @pytest.mark.parametrize(
        ("change", "miss"),
        [
            ({}, None),
            ({"resident_ms": 1.1}, "resident"),
            ({"wait_ms": 0.2}, "waited"),
            ({"model_ms": 4.1}, "no receiver"),
            ({"wrong": 1}, "wrong values"),
        ],
    )
    def test_each_threshold_can_be_missed(self, change, miss):
        """Residency, wait, model time and values are judged one by one."""
        rows = [self.row("none"), self.row("immediate"), self.row("pre-model"), self.row("post-model", **change)]
        found = residency_rows.verdicts(rows)
        assert (miss is None and not found) or (len(found) == 1 and miss in found[0])
        assert len(residency_rows.table(rows).splitlines()) == 6

    @pytest.mark.parametrize(("share", "nothing"), [(0.9, 0), (0.1, 1)])
    def test_a_receive_that_is_hardly_resident_proves_nothing(self, share, nothing):
        """Posting it later can save nothing then, and that is said."""
        rows = [self.row("none"), self.row("immediate", share=share), self.row("post-model")]
        assert len(residency_rows.proves_nothing(rows)) == nothing

    def test_medians(self):
        """Fields take their own median, and no wrong value gets lost in it."""
        rows = [self.row("none", model_ms=value, wrong=wrong) for value, wrong in ((1.0, 0), (9.0, 2), (2.0, 0))]
        assert (residency_rows.median(rows).model_ms, residency_rows.median(rows).wrong) == (2.0, 2)


def test_the_overhead_benchmark_runs(monkeypatch, capsys):
    """A round of few steps gives a line for each arm; nobody asserts its times here."""
    import torch
    from vllm.v1.worker.gpu import pp_utils

    from trtllm_pp_progress.vllm import shape as _shape

    for owner, name in (
        (torch.cuda, "Stream"),
        (torch.cuda, "Event"),
        (torch.cuda, "current_stream"),
        (torch.cuda, "stream"),
        (torch.Tensor, "record_stream"),
        (torch.distributed, "broadcast"),
        (pp_utils, "get_pp_group"),
        (_shape, "observe"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    try:
        assert overhead.main(["--rows", "8", "--steps", "20", "--rounds", "1"]) == 0
    finally:
        uninstall()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert len(rows) == len(overhead.ARMS)
    added = dict(zip(overhead.ARMS, (int(row[-1]) for row in rows), strict=True))
    # Of Python 3.11, some 25 ns each: what these limits let through is a microsecond, and ten.
    assert added["off"] == 0
    assert added["before warm-up"] <= 30
    assert max(added.values()) <= 360

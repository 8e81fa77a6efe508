"""The script for several GPUs, on CPUs: vLLM's own class from a folder, gloo, fake streams."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import vllm.v1.worker.gpu.pp_utils as pp_utils
from fake_cuda import Cuda

from receive import nccl
from receive.carried import handler_class


@pytest.fixture
def carried(tmp_path):
    """Return a folder with the one file that the script needs of vLLM."""
    shutil.copy(pp_utils.__file__, tmp_path / "pp_utils.py")
    return tmp_path


def rank_process(rank, size, arguments, sabotage, output):
    sys.stdout = sys.stderr = open(output, "w", buffering=1)  # noqa: SIM115  for the life of the process
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    Cuda().install()
    torch.use_deterministic_algorithms(True)  # torch.empty then fills with the largest number
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.cuda.current_device = lambda: 0
    if sabotage:
        import sabotage as faults

        getattr(faults, sabotage)()
    sys.exit(nccl.main(arguments))


def start(carried, size, sabotage=""):
    """Run the script on that many ranks; return their exit codes, and what each has printed."""
    words = f"--device cpu --loads tiny --rows 8 --steps 12 --rounds 2 --meeting file://{carried}/meeting"
    arguments = [*words.split(), "--carried", str(carried), "--output", f"{carried}/found.json"]
    context = multiprocessing.get_context("fork")
    outputs = [carried / f"{rank}.txt" for rank in range(size)]
    processes = [
        context.Process(target=rank_process, args=(rank, size, arguments, sabotage, outputs[rank]), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(100)
        return [process.exitcode for process in processes], [output.read_text() for output in outputs]
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.parametrize("size", [2, 3])
def test_every_arm_consumes_what_was_sent(carried, size):
    """On each rank and in each arm the same results in the same order of collectives, and a row for each."""
    codes, texts = start(carried, size)
    assert codes == [0] * size, "\n".join(texts)
    assert "every result and every order is right" in texts[0]
    found = json.loads((carried / "found.json").read_text())
    assert len(found["rows"]) == size * len(nccl.arms(size))
    assert [row["outstanding"] for row in found["source"]] == list(range(1, 13))
    ages = {(row["arm"], row["rank"]): row["age"] for row in found["rows"]}
    assert ages["immediate", 0] == 0
    for rank in range(size - 1):  # but for the first, which is posted at once, and the last, which are flushed
        assert 0.6 < ages["rank-aware", rank] / (size - 1 - rank) <= 1
    assert found["wrong"] == []


def test_a_result_that_is_read_too_soon_is_found(carried):
    """A policy that leaves the event of step T in the slot reads unfilled buffers: every rank exits with 1."""
    codes, texts = start(carried, 2, "stale_event")
    assert 1 in codes, "\n".join(texts)
    assert "are not what was sent" in texts[0]


@pytest.mark.parametrize("more", [["--rows", "0"], ["--carried", "/nowhere"], ["--loads", "x"], ["--device", "tpu"]])
def test_a_bad_command_line(carried, more, capsys):
    """It ends with argparse's own error."""
    with pytest.raises(SystemExit, match="2"):
        nccl.options_from(["--carried", str(carried), *more])


def test_without_a_launcher_or_gpus_it_says_so(carried, monkeypatch, capsys):
    """One line, not a traceback, and before any rank waits for another."""
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit, match="torchrun or mpirun"):
        nccl.main(["--carried", str(carried)])
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="at least 2"):
        nccl.main(["--carried", str(carried)])
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert nccl.main(["--carried", str(carried)]) == 2
    assert "0 GPUs" in capsys.readouterr().err


def test_loading_the_class_leaves_vllm_as_it_was(carried):
    """The stand-ins are gone afterwards: what was imported is found again, what was not is not there."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}
    cls = handler_class(Path(carried), None)
    assert cls is not pp_utils.PPHandler
    assert cls.__name__ == "PPHandler"
    after = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}
    assert after == before

"""The doubles of every era where upstream's hang: a receiver that has left, and a collective at the top of the loop."""

import re

import pytest
from doubles import INLINE, PATCHED

HANG_S = 5  # for what must hang
DRAIN_S = 0.5
SLACK_S = 3.0  # beyond the drain deadline, of ranks that share a core
EVERY = [*PATCHED, *(f"{era}-async" for era in INLINE)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_receiver_that_has_left_costs_the_deadline_in_every_era(script, ranks):
    """One executor of each era after the other in one process: the last rank gives up one send, in time."""
    job = script(ranks, "eras", "gone", "patched", DRAIN_S, ",".join(EVERY))
    assert job.rc == 0, job.output
    closed = re.findall(r"^rank (\d+): era (\S+): closed in ([\d.]+) s, (\d+) abandoned$", job.output, re.M)
    assert {(int(rank), era): int(abandoned) for rank, era, _, abandoned in closed} == {
        (rank, era): int(rank == ranks - 1) for rank in range(ranks) for era in EVERY
    }, job.output
    assert max(float(seconds) for *_, seconds, _ in closed) < DRAIN_S + SLACK_S, job.output


@pytest.mark.parametrize("era", ["B/D", "E1", "F", "H-async"])
def test_without_the_patch_it_hangs_there(script, era):
    """Control: upstream's cleanup waits inside MPI for ever."""
    job = script(2, "eras", "gone", "stock", DRAIN_S, era, shutdown=HANG_S)
    assert job.hung, job.output
    assert "in wait_on_pp_send_handles" in job.output


@pytest.mark.parametrize("era", ["F", "G"])
def test_a_drain_that_cannot_end_lets_the_pipeline_go_on(script, era):
    """NVIDIA/TensorRT-LLM#18135: era F drains what cannot be received before it goes on; G drains what is due."""
    job = script(4, "eras", "collective", "patched", DRAIN_S, era)
    assert job.rc == 0, job.output
    assert "rank 0: tokens: 16" in job.output
    assert job.output.count("wrong: 0 abandoned: 0") == 4, job.output
    assert ("was not received in 0.5 s" in job.output) == (era == "F"), job.output


def test_without_the_patch_that_drain_hangs(script):
    """Control: four ranks of era F wait for each other, the last one in its drain, before their fifth iteration."""
    job = script(4, "eras", "collective", "stock", DRAIN_S, "F", shutdown=HANG_S)
    assert job.hung, job.output
    assert "in wait_on_pp_send_handles" in job.output, job.output
    assert "in top_of_loop" in job.output or "in <lambda>" in job.output, job.output


def test_on_three_ranks_it_does_not(script):
    """Control: the receive is due one iteration earlier there, and everything arrives without the patch."""
    job = script(3, "eras", "collective", "stock", DRAIN_S, "F")
    assert job.rc == 0, job.output
    assert "rank 0: tokens: 12" in job.output

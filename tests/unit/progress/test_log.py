"""What operators are told: one line that names the send, and not a line for each of twenty thousand."""

import logging
import subprocess
import sys

import pytest
from fakes import FakePart, FakeParts, FakeRequest
from rig import PEER, RANK, Rig

from trtllm_pp_progress.progress.log import Log, be_heard

TEXT = "MPI_ERR_PROC_FAILED: rank 3 has failed"


class FakeMpiError(RuntimeError):
    """MPI.Exception as it is met: its text says what failed, its repr a number."""

    def __init__(self, number):
        super().__init__(number)
        self.number = number

    def __str__(self):
        return f"{TEXT}, in operation {self.number}"

    def __repr__(self):
        return f"MPI.Exception({self.number})"


@pytest.fixture
def said(caplog):
    """Return a function that lists what was logged so far."""
    caplog.set_level(logging.DEBUG, logger="trtllm_pp_progress")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("shape", ["tested by a drive", "tested as it is written"])
def test_twenty_thousand_failures_are_five_lines(shape, said):
    """Each with another text: the first, the tenth, ...; rank, table, slot, peer and MPI's own words are in them."""
    rig = Rig(by_relay=True)
    for number in range(20_000):
        error = FakeMpiError(number)
        rig.post(FakeRequest(error=error) if shape == "tested by a drive" else FakeParts([FakePart(error=error)]), 3)
        rig.table[3] = None
    assert rig.counters.failed == 20_000
    lines = said()
    assert [line.split("(")[1].split(")")[0] for line in lines] == [
        f"{times} times so far" for times in (1, 10, 100, 1000, 10_000)
    ]
    for line in lines:
        assert line.startswith(
            f"rank {RANK}: the send in send_handles[3] to rank {PEER} is left to upstream's own wait"
        )
        assert f"FakeMpiError: {TEXT}, in operation " in line


def test_what_it_remembers_does_not_grow_with_what_was_said():
    """A count for each table and kind of error, however many texts there were."""
    log = Log(lambda: (RANK, PEER))
    for number in range(1000):
        log.left("send_handles", number % 8, FakeMpiError(number))
        log.dropped("send_handles", number % 8, FakeMpiError(number))
        log.silent(number, 0.1, f"reason {number}")
    assert len(log._times) == 3


def test_another_table_and_another_kind_of_error_are_said_at_once(said):
    """What is new to the operator is not lost in what is not."""
    log = Log()
    for _ in range(5):
        log.left("send_handles", 0, FakeMpiError(1))
        log.left("send_schedule_handles", 0, FakeMpiError(1))
        log.left("send_handles", 0, ConnectionError("gone"))
    assert len(said()) == 3


def test_while_closing_a_lost_send_is_an_error_that_names_it(caplog):
    """At ERROR: upstream drops warnings of all ranks but the leader."""
    log = Log(lambda: (RANK, PEER))
    log.dropped("send_handles", 5, FakeMpiError(7))
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage() == (
        f"rank {RANK}: the send in send_handles[5] to rank {PEER} failed while closing (1 times so far), lost: "
        f"FakeMpiError: {TEXT}, in operation 7"
    )


def test_rank_and_peer_are_asked_for_when_something_is_said(said):
    """An executor knows them only after it was made."""
    found = [None, None]
    log = Log(lambda: tuple(found))
    found[:] = [1, 2]
    log.stalled("send_handles", 0, 3.0)
    assert said() == ["rank 1: the send in send_handles[0] to rank 2 is pending for 3.0 s"]


def heard(code):
    """Return what a program that is to be heard writes to stderr."""
    code = f"import logging\nfrom trtllm_pp_progress.progress.log import be_heard, logger\n{code}"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd="/"
    ).stderr


def test_a_program_that_has_set_no_logging_up_hears_info_once():
    """With the pid, however often it is asked for."""
    said = heard("be_heard(); be_heard(); logger.info('something')")
    assert said.startswith("trtllm-pp-progress, pid ")
    assert said.endswith(": something\n")
    assert said.count("\n") == 1


def test_a_program_that_sets_logging_up_hears_it_in_its_own_way():
    """Before or after."""
    for code in (
        "logging.basicConfig(format='mine %(message)s'); be_heard()",
        "be_heard(); logging.basicConfig(format='mine %(message)s')",
    ):
        assert heard(f"{code}; logger.info('something')") == "mine something\n"


def test_a_level_that_was_set_stays(monkeypatch):
    """An operator who wants errors alone gets them alone."""
    logger = logging.getLogger("trtllm_pp_progress")
    monkeypatch.setattr(logger, "handlers", [logging.NullHandler()])
    monkeypatch.setattr(logger, "level", logging.ERROR)
    be_heard()
    assert logger.level == logging.ERROR

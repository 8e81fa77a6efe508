"""Handle shapes: each answers complete when it is, and never before; what cannot be asked is refused."""

from unittest.mock import MagicMock, Mock

import fakes
import pytest
from fakes import (
    NEVER,
    FakeMpiRequest,
    FakeMultiHandleWrapper,
    FakePlainRequest,
    FakeRequest,
    FakeWork,
    SendFailedError,
)

from trtllm_pp_progress.progress.handles import UnknownShapeError, completion_of, is_pkl5, pkl5_complete

SINGLE = [FakeRequest, FakeMpiRequest, FakePlainRequest, FakeWork]


@pytest.mark.parametrize("shape", SINGLE)
def test_a_single_handle_is_done_when_it_says_so(shape):
    """The answer is the flag: (False, None), which is truthy, is not done."""
    handle = shape(after=3)
    asked = completion_of(handle)
    assert [asked.done() for _ in range(3)] == [False, False, True]
    assert handle.tests == 3


@pytest.mark.parametrize("shape", SINGLE)
def test_a_complete_handle_is_not_asked_again(shape):
    """Once done, a completion stays done without touching the handle."""
    handle = shape(after=1)
    asked = completion_of(handle)
    assert [asked.done(), asked.done()] == [True, True]
    assert handle.tests == 1


def test_a_pkl5_request_answers_for_itself_although_it_is_a_tuple():
    """A tuple subclass with test() is one handle; its members are left alone."""
    handle = FakeRequest(after=1)
    assert isinstance(handle, tuple)
    assert len(handle) == 2
    assert completion_of(handle).done()


@pytest.mark.parametrize("container", [list, tuple])
@pytest.mark.parametrize("afters", [[2], [3, 1], [1, 3], [5, 1, 4, 2, 3]])
def test_a_list_is_done_when_every_handle_of_it_is(container, afters):
    """Whatever the order of completion, none is dropped, and those that are complete are not asked again."""
    works = [FakeWork(after) for after in afters]
    asked = completion_of(container(works))
    answers = [asked.done() for _ in range(max(afters))]
    assert answers == [False] * (max(afters) - 1) + [True]
    assert [work.tests for work in works] == afters


def test_a_list_may_mix_shapes_and_states():
    """Complete and pending handles of any shape, and nested lists, share one answer."""
    late = FakeWork(NEVER)
    asked = completion_of([FakeRequest(0), FakeMpiRequest(0), [late, FakePlainRequest(0)]])
    assert not asked.done()
    late.complete()
    assert asked.done()


def test_an_empty_list_is_done():
    """With nothing to wait for there is nothing pending."""
    assert completion_of([]).done()


@pytest.mark.parametrize(
    ("handle", "certain"),
    [(FakeRequest(), True), (FakeWork(), False), ([FakeRequest(), FakeWork()], False), ([], True)],
)
def test_only_test_is_certain_to_complete(handle, certain):
    """is_completed() may stay false for ever where a backend needs wait(), also inside a list."""
    assert completion_of(handle).certain is certain


def test_a_completed_work_is_confirmed_by_a_wait():
    """is_completed() is also true of a Work that failed; its wait(), which returns at once then, tells."""
    good = FakeWork(1)
    assert completion_of(good).done()
    assert good.waits == 1
    broken = FakeWork(1)
    broken.wait = Mock(side_effect=SendFailedError("peer gone"))
    with pytest.raises(SendFailedError):
        completion_of(broken).done()


@pytest.mark.parametrize("shape", SINGLE)
def test_what_a_handle_raises_is_raised(shape):
    """An error of a test reaches the caller unchanged."""
    error = SendFailedError("broken")
    with pytest.raises(SendFailedError) as raised:
        completion_of(shape(error=error)).done()
    assert raised.value is error


@pytest.mark.parametrize(
    "handle",
    [
        None,
        object(),
        1,
        "request",
        FakeMultiHandleWrapper([]),
        [FakeRequest(), None],
        [FakeMultiHandleWrapper([])],
        {"a": 1},
    ],
    ids=lambda handle: type(handle).__name__,
)
def test_a_handle_that_cannot_be_asked_is_refused(handle):
    """A handle with only wait(), or none at all, is of no known shape, alone or in a list."""
    with pytest.raises(UnknownShapeError, match="has neither test\\(\\) nor is_completed\\(\\)"):
        completion_of(handle)


@pytest.mark.parametrize(
    "answer",
    [None, (), "yes", 1.0, (None, None), ([True], None), MagicMock()],
    ids=lambda answer: type(answer).__name__,
)
def test_a_senseless_answer_is_no_answer(answer):
    """Only a flag says whether a send is complete: a mock's answer, which is truthy, does not."""
    with pytest.raises(UnknownShapeError, match="answered"):
        completion_of(Mock(spec=["test"], test=lambda: answer)).done()


def test_a_bare_mock_is_never_complete():
    """A MagicMock in place of a handle has a test(), whose answer is refused."""
    with pytest.raises(UnknownShapeError):
        completion_of(MagicMock()).done()


def test_the_fakes_notice_a_wait_that_nothing_ends():
    """Control: a blocking wait on a send that is never received is a fault, not a hang."""
    with pytest.raises(AssertionError, match="nobody receives"):
        FakeRequest(NEVER).wait()
    assert len(fakes.FAULTS) == 1
    fakes.FAULTS.clear()


class Member:
    """One MPI.Request of a pkl5.Request: complete from the nth test on."""

    def __init__(self, after):
        self.after = after
        self.tests = 0

    def Test(self):
        self.tests += 1
        return self.tests >= self.after


class Composite(tuple):
    """A pkl5.Request, whose own test() costs more and must not be needed."""

    __slots__ = ()

    def test(self):
        raise AssertionError("the members answer")


@pytest.mark.parametrize(("after", "tests"), [((1, 1), [1, 1]), ((1, 3), [3, 3]), ((2, 1), [2, 1])])
def test_the_members_of_a_pkl5_request_are_asked_directly(after, tests):
    """It is complete when its members are. They are asked in order, up to the first that is not complete.

    One that was complete is MPI_REQUEST_NULL by then, and asking it again costs next to nothing.
    """
    handle = Composite(Member(n) for n in after)
    asked = completion_of(handle)
    answers = [asked.done() for _ in range(max(after))]
    assert answers == [False] * (max(after) - 1) + [True]
    assert [member.tests for member in handle] == tests


@pytest.mark.parametrize(
    ("handle", "yes"),
    [
        (Composite([Member(1)]), True),
        (Composite([Member(1), Member(2)]), True),
        (Composite(), False),
        (FakeRequest(), False),
        ((), False),
        ([Member(1)], False),
        (Composite([Member(1), object()]), False),
    ],
    ids=["one", "two", "empty", "own test()", "plain", "list", "foreign member"],
)
def test_a_pkl5_request_is_known_by_its_members(handle, yes):
    """A tuple of at least one MPI.Request, and of nothing else."""
    assert is_pkl5(handle) is yes


@pytest.mark.parametrize(("after", "complete"), [((1, 1), True), ((1, 2), False), ((2, 1), False)])
def test_a_quick_test_asks_each_member_at_most_once(after, complete):
    """A quick test of a pkl5.Request is complete only if every member is."""
    handle = Composite(Member(n) for n in after)
    assert pkl5_complete(handle) is complete
    assert all(member.tests <= 1 for member in handle)

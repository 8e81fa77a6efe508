"""Compatibility: each era and mode gets its verdict, an unknown shape is left alone, and looking never raises."""

import functools
import json
import sys

import pytest
from doubles import ERAS, INLINE, MPIDist, TorchDist, executor_class, set_mpi_comm
from doubles.stubs import cleanup_stub, empty_stub
from fakes import FakeMpi

import trtllm_pp_progress
from trtllm_pp_progress.pyexecutor.shape import CLEANUP, LOOP, RELAY, RING, TABLES, WAIT, examine, recognise

PATCH, PARTIAL, STAND_DOWN = "patch", "partial", "stand down"


class Comm:
    """A communicator that can be duplicated and probed, and no more."""

    def Dup(self):
        """Return another one."""
        return Comm()

    def py2f(self):
        """Return a handle."""
        return 0

    def Iprobe(self, source, tag):
        """Find nothing."""
        return False


@pytest.fixture
def mpi(monkeypatch):
    """Put a fake MPI in place, and return it."""
    fake = FakeMpi()
    fake.Comm.f2py = lambda handle: Comm()
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", fake)
    monkeypatch.delenv("TLLM_PP_MPI_PROGRESS_POLL_MS", raising=False)
    set_mpi_comm(Comm())
    yield fake
    set_mpi_comm(None)


def instance(cls, dist=MPIDist, is_async=None):
    """Return an executor of four ranks' last, started but for its executor thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TLLM_PP_ASYNC_BROADCAST_SAMPLE_STATE", raising=False)
        if is_async is not None:
            patch.setenv("TLLM_PP_ASYNC_BROADCAST_SAMPLE_STATE", str(int(is_async)))
        executor = cls(dist(4, 3))
        executor.event_loop = lambda: None
        executor.start_worker()
        executor.shutdown()
    return executor


# Era x {class only, instance, Ray, sync, async}

OLD = dict.fromkeys(("class", "instance", "ray", "sync", "async"), STAND_DOWN)
THREAD = {**dict.fromkeys(("class", "instance", "sync", "async"), PATCH), "ray": STAND_DOWN}
INLINE_BY_DEFAULT = {"class": PARTIAL, "instance": PARTIAL, "ray": STAND_DOWN, "sync": PARTIAL, "async": PATCH}
TABLE = {
    "A1": OLD,
    "A2": OLD,
    "B/D": THREAD,
    "C": THREAD,
    "E1": THREAD,
    "E2": THREAD,
    "F": INLINE_BY_DEFAULT,
    "G": INLINE_BY_DEFAULT,
    "H": INLINE_BY_DEFAULT,
    "I": INLINE_BY_DEFAULT,
}
SUBJECTS = {"instance": {}, "ray": {"dist": TorchDist}, "sync": {"is_async": False}, "async": {"is_async": True}}


def test_the_table_has_every_era():
    """A new double needs a row."""
    assert tuple(TABLE) == ERAS


@pytest.mark.parametrize("subject", ["class", *SUBJECTS])
@pytest.mark.parametrize("era", ERAS)
def test_every_era_in_every_way(era, subject, mpi):
    """The era is named, what is done about it is what the table says, and why is said."""
    cls = executor_class(era)
    verdict = recognise(cls)
    if subject != "class":
        verdict = examine(instance(cls, **SUBJECTS[subject]), verdict)
        assert verdict.executor.dist == ("TorchDist" if subject == "ray" else "MPIDist")
    assert (verdict.era, verdict.action) == (era, TABLE[era][subject])
    assert verdict.reason
    assert verdict.patch == (verdict.action != STAND_DOWN)


@pytest.mark.parametrize("era", ERAS)
def test_install_acts_on_the_verdict(era):
    """A class is patched exactly if its verdict says so."""
    cls = executor_class(era)
    if recognise(cls).patch:
        with trtllm_pp_progress.install(cls) as installation:
            assert installation.compatibility == recognise(executor_class(era))
    else:
        with pytest.raises(trtllm_pp_progress.IncompatibleError, match="nothing is parked"):
            trtllm_pp_progress.install(cls)


@pytest.mark.parametrize(
    ("era", "words"),
    [
        ("A1", "nothing is parked"),
        ("B/D", "sends are parked"),
        ("C", "blocking flush becomes a bounded drive"),
        ("F", "stays on the executor thread"),
    ],
)
def test_the_reason_says_what_is_the_matter(era, words):
    """Operators read one line."""
    assert words in recognise(executor_class(era)).reason


def test_the_oldest_releases_have_no_wait_at_all():
    """Before NVIDIA/TensorRT-LLM#7462 nobody had a wait of its own for the send handles: era A1 all the same."""
    cls = executor_class("A1")
    del cls.wait_on_pp_send_handles
    assert (recognise(cls).era, recognise(cls).action) == ("A1", STAND_DOWN)


# What an instance knows


def test_below_thread_multiple_the_relay_thread_keeps_out_of_mpi(mpi):
    """A second thread in MPI would be an error there: only waits are bounded, and the verdict says so."""
    cls, verdict = executor_class("F"), recognise(executor_class("F"))
    mpi.level = 2
    found = examine(instance(cls), verdict)
    assert (found.action, found.drives) == (PARTIAL, False)
    assert "THREAD_MULTIPLE" in found.reason


@pytest.mark.parametrize("is_async", [False, True])
def test_a_pump_that_is_switched_off_stays_off(is_async, mpi, monkeypatch):
    """Era H: TLLM_PP_MPI_PROGRESS_POLL_MS at most 0 means no progress by an idle relay thread, upstream's or ours."""
    monkeypatch.setenv("TLLM_PP_MPI_PROGRESS_POLL_MS", "0")
    cls = executor_class("H")
    found = examine(instance(cls, is_async=is_async), recognise(cls))
    assert (found.action, found.drives) == (PARTIAL, False)
    assert "TLLM_PP_MPI_PROGRESS_POLL_MS" in found.reason


@pytest.mark.parametrize("flag", ["1", None, 1])
def test_a_flag_of_another_type_is_not_taken_for_a_mode(flag, mpi):
    """Who relays is not guessed."""
    cls = executor_class("G")
    executor = instance(cls)
    executor.pp_async_broadcast_sample_state = flag
    assert examine(executor, recognise(cls)).action == STAND_DOWN


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("make", [empty_stub, cleanup_stub])
def test_a_stub_gets_its_class_s_verdict(era, make):
    """Upstream's own tests leave most attributes out: nothing is asked that a stub could fail at."""
    cls = executor_class(era)
    verdict = recognise(cls)
    found = examine(make(cls), verdict)
    assert (found.era, found.action) == (verdict.era, verdict.action)


# Shapes that are not known


def grown(era, **attributes):
    """Return a fresh class of an era with some attributes set."""
    cls = executor_class(era)
    for name, value in attributes.items():
        setattr(cls, name, value)
    return cls


def written(text, module="doubles"):
    """Return the function of a text, as if it stood in a module of upstream's package."""
    namespace = {"__name__": module}
    exec(text, namespace)
    return namespace["function"]


def within(module):
    """Return a decorator of a module."""
    return written(
        "import functools\n"
        "def function(inner):\n"
        "    @functools.wraps(inner)\n"
        "    def wrapper(*args, **kwargs):\n"
        "        return inner(*args, **kwargs)\n"
        "    return wrapper\n",
        module,
    )


def missing(era, name):
    """Leave a method out."""
    cls = executor_class(era)
    delattr(cls, name)
    return cls


def wrapped(era, name, module="ddtrace.contrib"):
    """Wrap a method as another package's patch does."""
    return grown(era, **{name: within(module)(vars(executor_class(era))[name])})


def overridden(era, name):
    """Override a method, in upstream's own package."""
    body = {"__module__": "doubles.eras", name: vars(executor_class(era))[name]}
    return type("Mine", (executor_class(era),), body)


class Callable:
    """A stand-in for a method that is an object."""

    def __call__(self):
        """Do nothing."""


UNKNOWN = {
    "method missing": lambda era, name: missing(era, name),
    "other signature": lambda era, name: grown(era, **{name: written("def function(self, a, b, c, d): pass")}),
    "attribute of another type": lambda era, name: grown(era, **{name: "text"}),
    "an object": lambda era, name: grown(era, **{name: Callable()}),
    "overridden": lambda era, name: overridden(era, name),
    "wrapped by another": lambda era, name: wrapped(era, name),
    "replaced by another": lambda era, name: grown(era, **{name: lambda self, *given: None}),
}


@pytest.mark.parametrize("name", [RELAY, RING, WAIT, CLEANUP])
@pytest.mark.parametrize("era", [era for era in ERAS if TABLE[era] is not OLD])
@pytest.mark.parametrize("how", UNKNOWN)
def test_an_unknown_shape_is_never_patched(how, era, name):
    """Whatever is wrong with one of the four methods: unknown, left object by object as it was, and named."""
    cls = UNKNOWN[how](era, name)
    before = dict(vars(cls))
    verdict = recognise(cls)
    assert (verdict.era, verdict.action) == ("unknown", STAND_DOWN)
    assert name in verdict.reason or (how == "overridden" and f"or {WAIT}" in verdict.reason)
    with pytest.raises(trtllm_pp_progress.IncompatibleError):
        trtllm_pp_progress.install(cls)
    assert dict(vars(cls)) == before


@pytest.mark.parametrize("attribute", ["progress_pp_send_handles", *TABLES, "executed_batch_queue"])
def test_a_class_that_drives_its_sends_already_is_not_patched_again(attribute):
    """Another patch, another copy of this one, or an upstream that took in NVIDIA/TensorRT-LLM#14850."""
    verdict = recognise(grown("E2", **{attribute: property(lambda self: None)}))
    assert not verdict.patch
    assert f"has {attribute}" in verdict.reason


def test_a_patched_class_is_recognised_as_such():
    """Nobody can install twice without being told."""
    cls = executor_class("G")
    with trtllm_pp_progress.install(cls):
        assert "already patched" in recognise(cls).reason
    assert recognise(cls).patch


@pytest.mark.parametrize(
    "text",
    [
        "def function(self, microbatch_id): pass",
        "def function(self, handles, slot): pass",
        "def function(self, microbatch_id, send_handles): pass",
        "def function(*args): pass",
    ],
)
def test_a_wait_with_other_parameters_makes_a_shape_unknown(text):
    """Only the known parameters, by name and order, are wrapped."""
    verdict = recognise(grown("E2", **{WAIT: written(text)}))
    assert verdict.era == "unknown"
    assert f"{WAIT} takes" in verdict.reason


def test_a_relay_on_another_queue_makes_a_shape_unknown():
    """The queue is what the idle wait replaces; a loop that does not read it cannot be helped."""
    verdict = recognise(grown("E2", **{RELAY: written("def function(self): self.another_queue.get()")}))
    assert verdict.era == "unknown"
    assert "executed_batch_queue" in verdict.reason


@pytest.mark.parametrize("name", ["_pp_mpi_progress", "make_mpi_progress_pump", "MpiProgressThread"])
@pytest.mark.parametrize("where", ["__init__", "start_worker"])
def test_progress_made_in_another_way_is_not_interfered_with(name, where):
    """A pump that the relay's loop does not tick, or a native thread."""
    verdict = recognise(grown("G", **{where: written(f"def function(self): self.x = {name}; self.{name} = None")}))
    assert (verdict.era, verdict.action) == ("unknown", STAND_DOWN)
    assert "way of its own" in verdict.reason


HALF_AN_I = {
    "a starter that nobody's __init__ knows of": (
        "H",
        {"_start_mpi_progress_thread": written("def function(self): pass")},
    ),
    "a thread without a starter": ("H", {"helper": written("def function(self): self._mpi_progress_thread = None")}),
    "a thread where no pump ticks": (
        "G",
        {
            "__init__": written("def function(self): self._mpi_progress_thread = None"),
            "_start_mpi_progress_thread": written("def function(self): pass"),
        },
    ),
    "the binding in a helper": ("H", {"helper": written("def function(self): MpiProgressThread(0, 1, 2)")}),
}


@pytest.mark.parametrize("how", HALF_AN_I)
def test_a_native_thread_that_is_not_era_i_s_is_not_interfered_with(how):
    """Only the one that was read is known: made in __init__ and by a starter, beside a pump."""
    era, attributes = HALF_AN_I[how]
    verdict = recognise(grown(era, **attributes))
    assert (verdict.era, verdict.action) == ("unknown", STAND_DOWN)
    assert "way of its own" in verdict.reason


# What a verdict says


@pytest.mark.parametrize("era", ERAS)
def test_a_verdict_is_described_in_plain_values(era, mpi):
    """The keys of before; an executor's has what only an instance knows."""
    cls = executor_class(era)
    verdict = recognise(cls)
    found = verdict.describe()
    assert set(found) == {"era", "action", "reason", "found"}
    assert (type(found["action"]), found["action"]) == (str, verdict.action.value)
    assert set(found["found"]) == {"class", "parameters"}
    of_instance = examine(instance(cls), verdict).describe()["found"]
    assert set(of_instance) == {
        "class",
        "parameters",
        "dist",
        "pp_async_broadcast_sample_state",
        "num_micro_batches",
        "thread_multiple",
        "pump",
        "driven",
    }
    json.dumps(of_instance)


@pytest.mark.parametrize(
    ("era", "level", "options", "may"),
    [
        ("E2", 3, {}, True),
        ("F", 3, {}, True),
        ("E2", 2, {}, False),
        ("E2", 3, {"dist": TorchDist}, False),
        ("A2", 3, {}, False),
    ],
    ids=["patched", "partial", "below THREAD_MULTIPLE", "Ray", "stands down"],
)
def test_whether_a_thread_of_ours_may_enter_mpi(era, level, options, may, mpi):
    """For an executor that is patched at least in part, where two threads may be in MPI; never for a class."""
    cls = executor_class(era)
    executor = instance(cls, **options)
    mpi.level = level
    verdict = recognise(cls)
    assert not verdict.may_drive
    assert not verdict.drives
    assert examine(executor, verdict).may_drive is may


# How eras are told apart


def test_a_flush_is_found_in_a_function_within():
    """C and B/D differ by one statement, wherever in the loop that is."""
    text = "def function(self):\n    def flush():\n        return self.executed_batch_queue.empty()\n    flush()\n"
    assert recognise(grown("B/D", **{RELAY: written(text)})).era == "C"


@pytest.mark.parametrize("era", ERAS)
def test_tracing_does_not_hide_an_era(era):
    """Upstream wraps methods for tracing: what is inside decides."""
    cls = executor_class(era)
    for name in (RELAY, RING, WAIT, CLEANUP, LOOP, "__init__"):
        if name in vars(cls):
            setattr(cls, name, within("nvtx.nvtx")(within("doubles.world")(vars(cls)[name])))
    assert recognise(cls).era == era


@pytest.mark.parametrize("era", ERAS)
def test_a_subclass_that_changes_nothing_is_of_its_base_s_era(era):
    """It is judged by what it inherits."""
    assert recognise(type("Mine", (executor_class(era),), {})).era == era


def looped():
    """Return a function whose __wrapped__ leads back to itself."""

    def function(self):
        return None

    function.__wrapped__ = function
    return function


ODD = [
    None,
    1,
    "text",
    object(),
    property(lambda self: None),
    staticmethod(len),
    len,
    functools.partial(print),
    type,
    looped(),
]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: type(odd).__name__)
@pytest.mark.parametrize("name", [RELAY, RING, WAIT, CLEANUP, LOOP, "__init__", "start_worker"])
def test_looking_never_raises(name, odd):
    """Whatever stands where a method should be, there is a verdict, and it can be written down."""
    verdict = recognise(grown("E2", **{name: odd}))
    json.dumps(verdict.describe())


@pytest.mark.parametrize("cls", [object, int, type, dict, type("Empty", (), {}), Exception])
def test_any_other_class_is_unknown(cls):
    """A class that is no executor is not patched."""
    assert not recognise(cls).patch


@pytest.mark.parametrize("era", ERAS)
def test_looking_changes_nothing_and_constructs_nothing(era):
    """A verdict leaves the class as it was."""
    cls = executor_class(era)
    cls.__new__ = None
    before = dict(vars(cls))
    recognise(cls)
    assert dict(vars(cls)) == before


def test_the_inline_eras_are_those_of_the_doubles():
    """The table and the doubles agree."""
    assert tuple(era for era in ERAS if TABLE[era] is INLINE_BY_DEFAULT) == INLINE

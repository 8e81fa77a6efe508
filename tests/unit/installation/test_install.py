"""install, uninstall, installed, status: any order, any time relative to upstream's import, all or nothing."""

import gc
import importlib
import itertools
import json
import logging
import re
import sys
import threading
from pathlib import Path

import doubles
import fakes
import pytest
from fakes import LIMIT_S, NEVER, PATCHABLE, FakeDist, FakeRequest, HookedLock, elsewhere, executor_class, join

import trtllm_pp_progress as package
from trtllm_pp_progress import IncompatibleError, PatchError, Settings, SettingsError
from trtllm_pp_progress.installation import install as _install
from trtllm_pp_progress.patching.patch import Graft
from trtllm_pp_progress.progress.engine import Engine
from trtllm_pp_progress.pyexecutor.attachment import engine_of
from trtllm_pp_progress.pyexecutor.grafts import Grafts
from trtllm_pp_progress.pyexecutor.shape import QUEUE, TABLES
from trtllm_pp_progress.pyexecutor.side_sends import SENDERS

GRAFTED = {
    "progress_pp_send_handles",
    "wait_on_pp_send_handles",
    "_ring_broadcast_sample_state",
    "_executor_loop_cleanup",
    "_pp_progress",
    *TABLES,
    *SENDERS,
    QUEUE,
}
NOTHING = {"installed": [], "waiting": None, "stood_down": []}


def view(cls):
    """Return what a class holds, to be compared by same()."""
    return dict(vars(cls))


def same(cls, before):
    """Whether a class holds the very same objects as before, in the same order."""
    return list(vars(cls)) == list(before) and all(vars(cls)[name] is before[name] for name in before)


@pytest.fixture
def cls():
    """Return a fresh class of era E."""
    return executor_class("E2")


@pytest.fixture
def upstream(tmp_path, monkeypatch):
    """Return a function that writes a stand-in for upstream's package, not imported yet; all traces go at the end."""

    def write(body="from fakes import executor_class\nPyExecutor = executor_class('E2')\n"):
        folder = tmp_path / "tensorrt_llm" / "_torch" / "pyexecutor"
        folder.mkdir(parents=True)
        for package_folder in (folder, folder.parent, folder.parent.parent):
            (package_folder / "__init__.py").touch()
        (folder / "py_executor.py").write_text(body)
        importlib.invalidate_caches()
        return lambda: importlib.import_module(_install.MODULE)

    monkeypatch.syspath_prepend(tmp_path)
    yield write
    package.uninstall()
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


# On a class that is there


@pytest.mark.parametrize("era", PATCHABLE)
def test_install_grafts_and_uninstall_restores_object_by_object(era):
    """Exactly the named attributes change, and come back as the very same objects."""
    cls = executor_class(era)
    before = view(cls)
    installation = package.install(cls)
    assert (installation.state, installation.compatibility.era, installation.cls) == ("installed", era, cls)
    assert {name for name, value in vars(cls).items() if before.get(name) is not value} == GRAFTED
    assert package.installed(cls)
    restored = package.uninstall(cls)
    assert set(restored) == {f"PyExecutor.{name}" for name in GRAFTED}
    assert same(cls, before)
    assert not package.installed(cls)


CALLS = ("install", "uninstall", "installed", "status")


@pytest.mark.parametrize(
    "calls", [*itertools.product(CALLS, repeat=2), *itertools.product(CALLS, repeat=3)], ids="-".join
)
def test_calls_in_any_order(calls, cls):
    """Every order of two and three calls does what it says, is idempotent, and never wraps twice."""
    before, there = view(cls), False
    for call in calls:
        if call == "install":
            assert package.install(cls).state == ("already installed" if there else "installed")
            there = True
        elif call == "uninstall":
            assert bool(package.uninstall(cls)) == there
            there = False
        elif call == "installed":
            assert package.installed(cls) == there
        else:
            assert [entry["era"] for entry in package.status()["installed"]] == (["E2"] if there else [])
        assert same(cls, before) == (not there)
        if there:
            assert vars(cls)["wait_on_pp_send_handles"].__wrapped__ is before["wait_on_pp_send_handles"]
    package.uninstall()
    assert same(cls, before)


def test_a_second_install_keeps_the_first_ones_settings_and_says_so(cls, caplog):
    """It changes nothing, with a warning."""
    package.install(cls, max_polls=5)
    package.install(cls, max_polls=6)
    assert package.status()["installed"][0]["settings"]["max_polls"] == 5
    assert "already installed on" in caplog.text


def test_several_classes_are_installed_and_uninstalled_apart(cls):
    """Without a target uninstall() takes them all."""
    other = executor_class("C")
    views = view(cls), view(other)
    package.install(cls)
    package.install(other)
    package.uninstall(other)
    assert (package.installed(cls), package.installed(other)) == (True, False)
    package.install(other)
    assert len(package.uninstall()) == 2 * len(GRAFTED)
    assert same(cls, views[0])
    assert same(other, views[1])


def test_a_subclass_is_patched_by_itself(cls):
    """Inherited methods are wrapped on the subclass, and gone from it afterwards; the base is left alone."""
    mine = type("Mine", (cls,), {})
    before, base = view(mine), view(cls)
    package.install(mine)
    assert same(cls, base)
    assert isinstance(mine().send_handles, list)
    package.uninstall(mine)
    assert same(mine, before)


@pytest.mark.parametrize("era", [era for era in doubles.ERAS if era not in doubles.PATCHED])
def test_a_shape_with_nothing_to_gain_is_refused_with_the_reason(era):
    """An explicit install raises, names class and era, and changes nothing."""
    cls = doubles.executor_class(era)
    before = view(cls)
    with pytest.raises(IncompatibleError, match=f"PyExecutor is left as it is \\(era {era}\\): "):
        package.install(cls)
    assert same(cls, before)
    assert package.status() == NOTHING


@pytest.mark.parametrize("target", [object, int, type("Other", (), {})])
def test_any_other_class_is_refused(target):
    """Something that is no executor is an error that names it."""
    with pytest.raises(IncompatibleError, match=f"{target.__qualname__} is left as it is \\(era unknown\\)"):
        package.install(target)


BAD = [
    {"max_polls": 0},
    {"max_polls": "x"},
    {"drain_deadline_s": float("nan")},
    {"mode": "fast"},
    {"polls": 1},
    {"backoff_min_us": 501},
]


@pytest.mark.parametrize("arguments", BAD, ids=str)
@pytest.mark.parametrize("is_imported", [True, False])
def test_a_bad_argument_leaves_everything_untouched(arguments, is_imported, cls):
    """Nothing is patched, waited for or recorded."""
    before = view(cls)
    with pytest.raises(SettingsError):
        package.install(cls if is_imported else None, **arguments)
    assert same(cls, before)
    assert package.status() == NOTHING


@pytest.mark.parametrize("is_imported", [True, False])
def test_a_bad_variable_leaves_everything_untouched(is_imported, cls, monkeypatch):
    """The environment is read by install(), and refused by the variable's name."""
    monkeypatch.setenv("TRTLLM_PP_PROGRESS_MAX_POLLS", "nan")
    before = view(cls)
    with pytest.raises(SettingsError, match="TRTLLM_PP_PROGRESS_MAX_POLLS='nan'"):
        package.install(cls if is_imported else None)
    assert same(cls, before)
    assert package.status() == NOTHING


def test_settings_come_as_an_object_or_as_arguments(cls):
    """An object is used as it is; both at once is an error, for one of them would be ignored."""
    with pytest.raises(SettingsError, match="max_polls as well"):
        package.install(cls, Settings(), max_polls=1)
    package.install(cls, Settings(max_polls=9))
    assert package.status()["installed"][0]["settings"]["max_polls"] == 9


@pytest.mark.parametrize("step", range(len(GRAFTED)))
@pytest.mark.parametrize("where", ["make", "set"])
def test_a_failure_at_any_step_leaves_the_class_untouched(step, where, monkeypatch):
    """Whichever graft fails, while it is made or set: not installed, nothing changed, and a later install works."""

    class Refusing(type):
        """A metaclass that refuses one name once it is armed."""

        refused = None

        def __setattr__(cls, name, value):
            if name == Refusing.refused:
                raise RuntimeError("broken")
            super().__setattr__(name, value)

    held = ("__dict__", "__weakref__")
    body = {name: value for name, value in vars(executor_class("E2")).items() if name not in held}
    cls = Refusing("PyExecutor", (), body)
    before = view(cls)
    every = Grafts.all

    def broken(grafts):
        made = every(grafts)
        if where == "set":
            Refusing.refused = made[step].name
            return made

        def fail(original):
            raise RuntimeError("broken")

        made[step] = Graft(made[step].owner, made[step].name, fail)
        return made

    monkeypatch.setattr(Grafts, "all", broken)
    with pytest.raises(RuntimeError, match="broken"):
        package.install(cls)
    assert same(cls, before)
    assert package.status() == NOTHING
    Refusing.refused = None
    monkeypatch.setattr(Grafts, "all", every)
    assert package.install(cls).state == "installed"


def test_a_buried_patch_is_not_uninstalled(cls):
    """Where somebody patched over ours, uninstall() raises, stays installed, and works once theirs is gone."""
    before = view(cls)
    package.install(cls)
    ours = cls.wait_on_pp_send_handles
    cls.wait_on_pp_send_handles = lambda self, send_handles, microbatch_id: None
    with pytest.raises(PatchError, match=r"PyExecutor\.wait_on_pp_send_handles is not ours any more"):
        package.uninstall(cls)
    assert package.installed(cls)
    cls.wait_on_pp_send_handles = ours
    package.uninstall(cls)
    assert same(cls, before)


# As a context manager


def test_a_block_uninstalls_at_its_end_whatever_happens_in_it(cls):
    """A with block restores the class, also after an error, which passes."""
    before = view(cls)

    def fail():
        with package.install(cls) as installation:
            assert package.installed(installation.cls)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert same(cls, before)


def test_a_block_undoes_only_what_it_did(cls):
    """An inner block on a class that is installed already leaves it installed."""
    package.install(cls)
    with package.install(cls):
        pass
    assert package.installed(cls)


def test_a_block_that_waits_leaves_other_classes_alone(cls, upstream):
    """The end of such a block ends the waiting, or uninstalls from upstream's class, and from no other."""
    load = upstream()
    package.install(cls)
    with package.install() as installation:
        assert installation.state.startswith("waiting for the import of ")
    assert package.status()["waiting"] is None
    with package.install():
        module = load()
        assert package.installed(module.PyExecutor)
    assert not package.installed(module.PyExecutor)
    assert package.installed(cls)


# Upstream's class, imported or not


def test_upstreams_class_is_the_default_once_it_is_imported(upstream):
    """Without a target the class of the imported module is patched at once."""
    cls = upstream()().PyExecutor
    before = view(cls)
    assert package.installed() is False
    assert package.install().cls is cls
    assert package.installed() is True
    package.uninstall()
    assert same(cls, before)


def test_a_class_imported_later_is_patched_on_import(upstream):
    """The hook runs before the importer sees the module, with the settings of the install() that waited."""
    load = upstream()
    installation = package.install(max_polls=5)
    assert installation.state == f"waiting for the import of {_install.MODULE}"
    assert (package.status()["waiting"], package.installed()) == (_install.MODULE, False)
    module = load()
    assert package.installed()
    assert package.status()["installed"][0]["settings"]["max_polls"] == 5
    assert package.status()["waiting"] is None
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
    assert package.install().state == "already installed"


def test_a_second_install_before_the_import_changes_nothing_and_says_so(upstream, caplog):
    """The first one's settings are used."""
    load = upstream()
    package.install(max_polls=5)
    assert package.install(max_polls=6).state == f"already waiting for the import of {_install.MODULE}"
    assert "already waiting" in caplog.text
    load()
    assert package.status()["installed"][0]["settings"]["max_polls"] == 5


def test_uninstall_before_the_import_means_that_it_is_not_patched(upstream):
    """The hook finds nothing to do."""
    load = upstream()
    package.install()
    package.uninstall()
    assert package.status() == NOTHING
    load()
    assert not package.installed()
    assert package.status() == NOTHING


def test_install_again_before_the_import_patches_once(upstream):
    """However often it was waited for and given up, the import patches once, with the last settings."""
    load = upstream()
    for polls in (4, 5, 6):
        package.uninstall()
        package.install(max_polls=polls)
    cls = load().PyExecutor
    assert not hasattr(cls.wait_on_pp_send_handles.__wrapped__, "__wrapped__")
    assert package.status()["installed"][0]["settings"]["max_polls"] == 6


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("from doubles import executor_class\nPyExecutor = executor_class('A1')\n", "nothing is parked"),
        ("class PyExecutor: pass\n", "era unknown"),
        ("PyExecutor = 3\n", "PyExecutor"),
        ("", "PyExecutor"),
    ],
    ids=["era A", "unknown", "no class", "empty"],
)
def test_a_hook_that_cannot_install_lets_the_import_succeed(upstream, body, reason, caplog):
    """The reason is logged once, as an error, and shown by status(): serving starts unpatched."""
    load = upstream(body)
    package.install()
    load()
    (why,) = package.status()["stood_down"]
    assert reason in why
    assert [record.levelno for record in caplog.records if record.name == "trtllm_pp_progress"] == [logging.ERROR]
    assert package.status()["waiting"] is None


def test_an_import_that_fails_can_be_repeated(upstream, tmp_path):
    """The hook stays for the attempt that succeeds."""
    load = upstream("raise OSError('no driver')")
    package.install()
    with pytest.raises(OSError, match="no driver"):
        load()
    assert package.status()["waiting"]
    (tmp_path / "tensorrt_llm/_torch/pyexecutor/py_executor.py").write_text(
        "from fakes import executor_class\nPyExecutor = executor_class('E2')  # written anew\n"
    )
    load()
    assert package.installed()


def test_install_in_the_middle_of_the_import_is_refused(upstream):
    """A module that is being imported has no class yet, and no hook would run any more: an error, not a promise."""
    load = upstream(
        "import trtllm_pp_progress, fakes\n"
        "try:\n"
        "    trtllm_pp_progress.install()\n"
        "except trtllm_pp_progress.IncompatibleError as error:\n"
        "    REFUSED = str(error)\n"
        "PyExecutor = fakes.executor_class('E2')\n"
    )
    module = load()
    assert "has no PyExecutor (yet)" in module.REFUSED
    assert package.status() == NOTHING
    assert package.install().state == "installed"


def test_the_hook_does_not_deadlock_with_another_thread(upstream):
    """A thread that asks for the status during the import, which is waited for there, gets its answer."""
    load = upstream(
        "import threading, trtllm_pp_progress, fakes\n"
        "thread = fakes.start(trtllm_pp_progress.status)\n"
        "thread.join(20)\n"
        "ENDED = not thread.is_alive()\n"
        "PyExecutor = fakes.executor_class('E2')\n"
    )
    package.install()
    assert load().ENDED
    assert package.installed()


# The automatic way in


def run_auto():
    """Import trtllm_pp_progress.auto as if for the first time."""
    sys.modules.pop("trtllm_pp_progress.auto", None)
    importlib.import_module("trtllm_pp_progress.auto")


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_importing_auto_installs_before_or_after_upstream(upstream, before):
    """One import line is enough, at either moment."""
    load = upstream()
    if before:
        run_auto()
    module = load()
    if not before:
        run_auto()
    assert package.installed(module.PyExecutor)


def test_importing_auto_never_raises(upstream, monkeypatch, caplog):
    """A bad variable, or a class that cannot be patched, is logged as an error, and serving starts."""
    monkeypatch.setenv("TRTLLM_PP_PROGRESS_MAX_POLLS", "0")
    run_auto()
    monkeypatch.delenv("TRTLLM_PP_PROGRESS_MAX_POLLS")
    upstream("class PyExecutor: pass\n")()
    run_auto()
    first, second = package.status()["stood_down"]
    assert "TRTLLM_PP_PROGRESS_MAX_POLLS='0'" in first
    assert "era unknown" in second
    assert {record.levelno for record in caplog.records} == {logging.ERROR}


# Living executors


def test_an_executor_sees_what_it_was_given_while_nothing_was_installed(cls):
    """Installed, undone, given a new queue and new tables, installed again: never the old ones."""
    package.install(cls)
    executor = cls()
    package.uninstall(cls)
    executor.send_handles, executor.executed_batch_queue = tables = [None], object()
    package.install(cls)
    assert (executor.send_handles, executor.executed_batch_queue) == tables
    del executor.send_handles
    assert not hasattr(executor, "send_handles")
    with pytest.raises(AttributeError, match="'PyExecutor' object has no attribute 'send_handles'"):
        _ = executor.send_handles
    with pytest.raises(AttributeError):
        del executor.send_handles


def test_status_lists_every_living_executor(cls):
    """Counters of each, and nothing of one that is gone; all of it can be written as JSON."""
    package.install(cls)
    first, second = cls(), cls()
    first.send_handles[0] = FakeRequest(0)
    executors = json.loads(json.dumps(package.status()))["installed"][0]["executors"]
    assert sorted(entry["tables"]["send_handles"]["posts"] for entry in executors) == [0, 1]
    assert [entry["verdict"]["action"] for entry in executors] == ["patch", "patch"]
    del second
    gc.collect()
    assert len(package.status()["installed"][0]["executors"]) == 1


def test_every_key_of_status_is_documented_and_no_other(cls):
    """Lists are taken for one of their entries; settings and what a verdict rests on have names of their own."""
    package.install(cls, drain_deadline_s=0)
    executor = cls()
    executor.send_handles[0] = FakeRequest(NEVER)
    engine_of(executor).close()
    executor.wait_on_pp_send_handles(executor.send_handles, 0)
    executor.send_handles[1] = FakeRequest(NEVER)
    (entry,) = package.status()["installed"]
    (one,) = entry["executors"]
    table, (abandoned,) = one["tables"]["send_handles"], one["abandoned"]
    keys = {*package.status(), *(f"installed.{name}" for name in entry)}
    keys |= {*one, *table, *table["pending"][0], *abandoned}
    keys |= {f"{name}.{key}" for name in ("verdict", "driver") for key in one[name]}
    document = (Path(__file__).parents[3] / "docs" / "status.md").read_text()
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", document, re.M)
    documented = {key for row in rows for key in re.findall(r"`([\w.]+)`", row[0])}
    documented |= {key for _, text in rows for key in re.findall(r"`(table|slot|rank|peer|age_s)`", text)}
    assert keys - {"verdict", "driver"} == documented


def test_an_executor_lives_on_after_uninstall():
    """Its relay goes on, with upstream's own waits, and ends with it."""
    cls = executor_class("E2")
    package.install(cls)
    dist = FakeDist(lambda: FakeRequest(3))
    executor = cls(dist)
    executor.start_worker()
    executor.executed_batch_queue.put(0)
    executor.executed_batch_response_queue.get(timeout=LIMIT_S)
    package.uninstall(cls)
    for batch in range(1, 2 * fakes.SLOTS):
        executor.executed_batch_queue.put(batch % fakes.SLOTS)
        executor.executed_batch_response_queue.get(timeout=LIMIT_S)
    executor.shutdown()
    assert len(dist.sent) == 2 * fakes.SLOTS
    assert all(handle.seen for handle in dist.sent)
    assert ("upstream wait", 1) in executor.events


def test_after_uninstall_upstreams_wait_meets_no_test(cls):
    """The relay is inside a test when uninstall() is called; upstream's wait comes right after, and is alone."""
    package.install(cls)
    executor = cls()
    entered, leave, relay = threading.Event(), threading.Event(), []

    def inside():
        if threading.current_thread() in relay:
            entered.set()
            assert leave.wait(LIMIT_S)

    executor.send_handles[0] = handle = FakeRequest(NEVER, inside=inside)
    driver = threading.Thread(target=engine_of(executor).drive, daemon=True)
    relay.append(driver)
    driver.start()
    assert entered.wait(LIMIT_S)
    executor.send_handles.sends.lock = HookedLock(executor.send_handles.sends.lock, leave.set, blocking=True)
    package.uninstall(cls)
    handle.complete()
    tests = handle.tests
    executor.wait_on_pp_send_handles(executor.send_handles, 0)
    join(driver)
    assert (handle.tests, handle.waits, executor.send_handles[0]) == (tests, 1, None)


def test_the_last_test_is_over_before_upstreams_wait_is_back(cls):
    """While a thread is inside a request, the class has our wait, which stays out of it."""
    original = vars(cls)["wait_on_pp_send_handles"]
    package.install(cls)
    executor = cls()
    seen = []
    sends = executor.send_handles.sends
    sends.lock = HookedLock(sends.lock, lambda: seen.append(vars(cls)["wait_on_pp_send_handles"]), blocking=True)
    package.uninstall(cls)
    assert len(seen) == 1
    assert seen[0] is not original
    assert vars(cls)["wait_on_pp_send_handles"] is original


def test_of_several_classes_none_is_uninstalled_if_one_is_buried(cls):
    """Nothing is changed, and no engine retires."""
    buried = executor_class("E2")
    for one in (cls, buried):
        package.install(one)
    executor = cls()
    ours = buried.wait_on_pp_send_handles
    buried.wait_on_pp_send_handles = lambda self, send_handles, microbatch_id: None
    with pytest.raises(package.PatchError, match="not ours any more"):
        package.uninstall()
    assert package.installed(cls)
    assert not engine_of(executor).retired
    buried.wait_on_pp_send_handles = ours
    package.uninstall()
    assert not package.installed(cls)


def test_uninstall_returns_although_a_test_is_stuck(cls, monkeypatch, caplog):
    """In time, with a line; status(), installed() and another install() answer meanwhile, and the class is restored."""
    before, other, answers = view(cls), executor_class("C"), []
    retire = Engine.retire
    monkeypatch.setattr(Engine, "retire", lambda engine: retire(engine, 0.05))
    package.install(cls)
    executor = cls()
    entered, leave = threading.Event(), threading.Event()
    executor.send_handles[0] = FakeRequest(NEVER, inside=lambda: (entered.set(), leave.wait(LIMIT_S)))
    driver = fakes.start(engine_of(executor).drive)
    assert entered.wait(LIMIT_S)
    sends = executor.send_handles.sends

    def meanwhile():
        answers.extend(
            elsewhere(ask) for ask in (package.status, package.installed, lambda: package.install(other).state)
        )

    sends.lock = HookedLock(sends.lock, meanwhile, blocking=True)
    restored = elsewhere(lambda: package.uninstall(cls))
    assert set(restored) == {f"PyExecutor.{name}" for name in GRAFTED}
    assert same(cls, before)
    assert answers == [NOTHING, False, "installed"]
    assert driver.is_alive()
    assert "a test of a send is stuck in MPI" in caplog.text
    leave.set()
    join(driver)


def test_the_keeper_goes_on_after_uninstall(cls):
    """What it has nobody else would drive."""
    package.install(cls, drain_deadline_s=0, mode="poll")
    dist = FakeDist(lambda: FakeRequest(NEVER, inside=lambda: tested.set() if uninstalled.is_set() else None))
    tested, uninstalled, executor = threading.Event(), threading.Event(), cls(dist)
    executor.start_worker()
    executor.executed_batch_queue.put(0)
    executor.executed_batch_response_queue.get(timeout=LIMIT_S)
    executor.shutdown()
    package.uninstall(cls)
    uninstalled.set()
    assert tested.wait(LIMIT_S)

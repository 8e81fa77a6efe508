"""Settings: where a value comes from, and which values are refused."""

import dataclasses
import os

import pytest

import trtllm_pp_progress
from trtllm_pp_progress.settings.core import Settings
from trtllm_pp_progress.settings.schema import PREFIX, SettingsError, choice, load, number, setting

NUMBERS = {
    "max_polls": (1, 1_000_000),
    "backoff_min_us": (1, 1_000_000),
    "backoff_max_us": (1, 1_000_000),
    "drain_deadline_s": (0, 3600),
    "stall_warning_s": (0.01, 86400),
}
NEVER_VALID = [
    "nan",
    "inf",
    "-inf",
    "-1",
    "x",
    "1e400",
    "0x10",
    "1,5",
    "None",
    "True",
    True,
    False,
    [],
    object,
]


def variable(name):
    """Return the environment variable of a field."""
    return PREFIX + name.upper()


def test_every_field_is_covered_here():
    """The tables of this file name every setting there is."""
    assert [*NUMBERS, "door", "nvtx", "mode"] == [field.name for field in dataclasses.fields(Settings)]


def test_defaults_are_valid():
    """A clean environment yields the defaults, and each of them passes its own parser."""
    defaults = load(Settings, {})
    assert defaults == Settings()
    for field in dataclasses.fields(Settings):
        assert field.metadata["parse"](getattr(defaults, field.name)) == field.default
        assert field.metadata["meaning"]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("bad", NEVER_VALID, ids=repr)
def test_a_value_that_is_no_number_in_range_is_refused(name, bad):
    """A bad argument names itself, its value and the valid range, in one line."""
    with pytest.raises(SettingsError) as refused:
        load(Settings, {}, **{name: bad})
    low, high = NUMBERS[name]
    assert str(refused.value).startswith(f"{name}={bad!r} is not valid: ")
    assert f"from {low:g} to {high:g}" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("bad", [text for text in NEVER_VALID if isinstance(text, str)], ids=repr)
def test_a_bad_variable_is_refused_by_its_own_name(name, bad):
    """A bad variable is reported as the variable, not as the field."""
    with pytest.raises(SettingsError, match=variable(name)):
        load(Settings, {variable(name): bad})


@pytest.mark.parametrize("name", NUMBERS)
def test_both_ends_of_a_range_are_valid_and_the_next_values_are_not(name):
    """Ranges include their ends, and nothing beyond them is clamped."""
    low, high = NUMBERS[name]
    parse = Settings.__dataclass_fields__[name].metadata["parse"]
    assert (parse(low), parse(high)) == (low, high)
    for beyond in (low - 1, high + 1):
        with pytest.raises(SettingsError):
            parse(beyond)


@pytest.mark.parametrize("bad", ["0", 0, "1.5", 1.5, "1e3", 2**70, "9" * 400, "9" * 5000])
def test_the_budget_is_a_whole_number(bad):
    """A budget of zero, a broken one and an enormous one are refused."""
    with pytest.raises(SettingsError, match="a whole number from 1 to 1e\\+06"):
        load(Settings, {}, max_polls=bad)


@pytest.mark.parametrize("good", ["64", " 64 ", 64, 64.0, "0064"])
def test_a_number_may_be_written_in_any_usual_way(good):
    """Text, blanks around text and whole floats are numbers, and come out as the declared kind."""
    polls = load(
        Settings,
        {variable("max_polls"): good} if isinstance(good, str) else {},
        max_polls=None if isinstance(good, str) else good,
    )
    assert polls.max_polls == 64
    assert type(polls.max_polls) is int


@pytest.mark.parametrize("bad", ["", "Auto", "thread", "auto,poll", "0", True, None.__class__, 1])
def test_an_unknown_mode_lists_the_valid_ones(bad):
    """A mode is one of three words, spelled exactly."""
    with pytest.raises(SettingsError, match=r"mode=.* is not valid: one of auto, poll, native$"):
        load(Settings, {}, mode=bad)


@pytest.mark.parametrize("bad", ["", " ", 2, "on", True, 1, 0])
def test_a_door_is_open_or_closed(bad):
    """Spelled as the variable is."""
    with pytest.raises(SettingsError, match=r"door=.* is not valid: one of 0, 1$"):
        load(Settings, {}, door=bad)


@pytest.mark.parametrize("empty", ["", " ", "\n", " \t "])
@pytest.mark.parametrize("name", [*NUMBERS, "mode", "door", "nvtx"])
def test_an_empty_variable_is_one_that_is_not_set(name, empty):
    """Job scripts and YAML files leave them behind: the default holds, or the argument."""
    assert load(Settings, {variable(name): empty}) == Settings()
    assert load(Settings, {variable("max_polls"): empty}, max_polls=7).max_polls == 7


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("bad", ["", " "])
def test_an_empty_argument_is_no_number(name, bad):
    """Whoever writes code means something by it."""
    with pytest.raises(SettingsError, match=f"{name}='{bad}' is not valid"):
        load(Settings, {}, **{name: bad})


def test_blanks_around_a_variable_are_not_part_of_it():
    """Shells and job scripts leave them behind; an argument is taken as it is."""
    assert load(Settings, {variable("mode"): " poll\n"}).mode == "poll"
    with pytest.raises(SettingsError):
        load(Settings, {}, mode=" poll")


def test_an_argument_beats_the_environment_which_beats_the_default():
    """Precedence is argument, environment, default; None as an argument means that none was given."""
    environ = {variable("max_polls"): "5", variable("mode"): "poll"}
    assert load(Settings, environ, max_polls=7) == Settings(max_polls=7, mode="poll")
    assert load(Settings, environ, max_polls=None) == Settings(max_polls=5, mode="poll")
    assert load(Settings, {}) == Settings()


def test_a_bad_variable_does_not_matter_where_an_argument_replaces_it():
    """The environment is not looked at for a field that an argument gives."""
    assert load(Settings, {variable("max_polls"): "x"}, max_polls=7).max_polls == 7


def test_the_process_environment_is_the_default(monkeypatch):
    """Without an explicit environment the process's own is read, at the time of the call."""
    monkeypatch.setenv(variable("max_polls"), "9")
    assert load(Settings).max_polls == 9
    monkeypatch.delenv(variable("max_polls"))
    assert load(Settings).max_polls == Settings().max_polls


def test_variables_of_others_are_left_alone():
    """An unknown variable with the prefix is no error: another settings class may own it."""
    assert load(Settings, {PREFIX + "VLLM_RECEIVE": "x", "TRTLLM_PP_PROGRESS": "1"}) == Settings()


def test_an_unknown_argument_lists_the_valid_ones():
    """A misspelled argument is refused before anything else is read."""
    with pytest.raises(SettingsError, match="unknown setting 'max_poll': valid ones are max_polls, backoff_min_us"):
        load(Settings, {variable("max_polls"): "x"}, max_poll=1)


@pytest.mark.parametrize("environ", [{}, {variable("backoff_min_us"): "600"}])
def test_the_shortest_pause_is_not_longer_than_the_longest(environ):
    """A minimum above the maximum is refused wherever it comes from; equal is fine."""
    arguments = {} if environ else {"backoff_min_us": 600}
    with pytest.raises(SettingsError, match="backoff_min_us=600 is not valid: at most backoff_max_us=500"):
        load(Settings, environ, **arguments)
    assert load(Settings, environ, backoff_max_us=600, **arguments).backoff_min_us == 600


@pytest.mark.parametrize(
    ("environ", "arguments"), [({variable("backoff_max_us"): "20"}, {}), ({}, {"backoff_max_us": 20})]
)
def test_a_longest_pause_below_the_default_shortest_is_to_blame_itself(environ, arguments):
    """Nobody has set the shortest: naming that would send the operator to a variable that is not there."""
    with pytest.raises(SettingsError, match=r"^backoff_max_us=20 is not valid: at least backoff_min_us=50$"):
        load(Settings, environ, **arguments)
    assert load(Settings, {**environ, variable("backoff_min_us"): "20"}, **arguments).backoff_max_us == 20


def test_settings_are_frozen():
    """Nothing changes settings once they are validated."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().max_polls = 1


@pytest.mark.parametrize(
    ("name", "bad"), [("max_polls", 0), ("max_polls", "x"), ("drain_deadline_s", float("nan")), ("mode", "x")]
)
def test_settings_made_by_hand_are_validated_too(name, bad):
    """The public class refuses what load() refuses: install(settings=...) takes it as it is."""
    with pytest.raises(SettingsError, match=name):
        Settings(**{name: bad})


def test_a_settings_error_is_a_value_error():
    """Callers may catch ValueError without importing the package's own class."""
    assert issubclass(trtllm_pp_progress.SettingsError, ValueError)


def test_another_class_may_declare_settings_of_its_own():
    """load() serves any frozen dataclass whose fields are declared with setting(), under its own prefix."""

    @dataclasses.dataclass(frozen=True)
    class Other:
        size: int = setting(2, number(int, 0, 9), "a size")
        kind: str = setting("a", choice("a", "b"), "a kind")

    assert load(Other, {"OTHER_SIZE": "3", PREFIX + "SIZE": "4"}, prefix="OTHER_", kind="b") == Other(3, "b")


def test_reading_the_environment_does_not_change_it(monkeypatch):
    """Loading settings leaves os.environ as it was."""
    monkeypatch.setenv(variable("max_polls"), " 9 ")
    before = dict(os.environ)
    load(Settings)
    assert dict(os.environ) == before

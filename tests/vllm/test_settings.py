"""What an operator may set, and what is said about the rest."""

from __future__ import annotations

import pytest

from trtllm_pp_progress.vllm import Settings, SettingsError
from trtllm_pp_progress.vllm.settings import load_settings, unknown_variables

RECEIVE, PLACEMENT = "TRTLLM_PP_PROGRESS_VLLM_RECEIVE", "TRTLLM_PP_PROGRESS_VLLM_PLACEMENT"


def test_off_is_the_default():
    """Without a word from the operator nothing is switched on."""
    assert load_settings({}) == Settings(receive="off", timing="on", stall_warning_s=8)
    assert load_settings({RECEIVE: ""}) == load_settings({})  # as every variable of this package


def test_the_switch_alone_is_rank_aware():
    """On means the policy that measured best, on every rank its own delay, after the model."""
    assert load_settings({RECEIVE: "on"}) == load_settings({RECEIVE: "rank-aware"})
    assert [load_settings({RECEIVE: "on"}).delay(rank, 4) for rank in range(3)] == [3, 2, 1]


@pytest.mark.parametrize("value", ["off", "rank-aware", "watch", "7", " 3 "])
def test_one_variable_is_enough(value):
    """The receive variable alone selects a policy."""
    settings = load_settings({RECEIVE: value})
    assert str(settings.receive) == value.strip()


@pytest.mark.parametrize(
    "value",
    ["-1", "x", "1.5", "ON", "true", "1e3", "nan", "²", "True", "00", "delay-0", "delay-", "delay-1.5", "delay 1"],
)
def test_a_value_that_is_none_names_itself_and_the_valid_ones(value):
    """The error is raised when the variable is read, long before a step."""
    with pytest.raises(SettingsError) as error:
        load_settings({RECEIVE: value})
    assert f"{RECEIVE}={value!r}" in str(error.value)
    assert "off (0), on (1), rank-aware, watch, or a delay in steps, delay-1 to delay-N" in str(error.value)


@pytest.mark.parametrize(("receive", "pp_size"), [(2, 2), (4, 4), (9, 4)])
def test_a_delay_that_reaches_pp_size_is_refused_once_that_is_known(receive, pp_size):
    """The message names the value, pp_size and what is valid with it."""
    with pytest.raises(SettingsError, match=rf"RECEIVE={receive} .*pp_size={pp_size}.* from 1 to {pp_size - 1}"):
        load_settings(receive=receive).delay(0, pp_size)


@pytest.mark.parametrize("pp_size", [2, 3, 4, 16])
def test_delays(pp_size):
    """A number is the delay of every rank; rank-aware gives each its own."""
    assert load_settings(receive=1).delay(0, pp_size) == 1
    assert load_settings(receive=pp_size - 1).delay(0, pp_size) == pp_size - 1
    aware = load_settings(receive="rank-aware")
    assert [aware.delay(rank, pp_size) for rank in range(pp_size - 1)] == list(range(pp_size - 1, 0, -1))


@pytest.mark.parametrize("value", ["pre-model", "post-model", ""])
def test_a_placement_says_what_to_set_instead(value):
    """The variable is gone: whoever still sets it is told in one line where the same receives are posted now."""
    with pytest.raises(SettingsError) as error:
        load_settings({RECEIVE: "3", PLACEMENT: value})
    said = str(error.value)
    assert f"{PLACEMENT}={value!r}" in said
    assert f"{RECEIVE} to delay-(d - 1)" in said
    assert "\n" not in said
    with pytest.raises(SettingsError, match="unknown setting 'placement'"):
        load_settings({}, receive=3, placement=value or "pre-model")


@pytest.mark.parametrize(("value", "meant"), [("0", "off"), ("1", "rank-aware"), ("on", "rank-aware")])
def test_one_and_zero_are_a_switch(value, meant):
    """As in the package's other variable: 1 is on, not a delay of one step."""
    assert load_settings({RECEIVE: value}).receive == meant


def test_a_delay_of_one_step_can_be_said():
    """In the environment by its name, in a program by its number."""
    assert load_settings({RECEIVE: "delay-1"}).receive == 1
    assert load_settings({RECEIVE: "delay-3"}).receive == load_settings({RECEIVE: "3"}).receive == 3
    assert load_settings({}, receive=1).receive == 1
    for value in (-1, True, 1.0):
        with pytest.raises(SettingsError, match="receive="):
            load_settings({}, receive=value)


def test_variables_that_are_no_settings_are_named():
    """Only those that look like one of ours."""
    environ = {RECEIVE: "on", "TRTLLM_PP_PROGRESS_VLLM_RECIEVE": "on", "TRTLLM_PP_PROGRESS_MODE": "poll", "PATH": "/"}
    assert unknown_variables(environ) == ["TRTLLM_PP_PROGRESS_VLLM_RECIEVE"]


def test_an_argument_wins_over_the_environment():
    """Precedence is argument, environment, default."""
    assert load_settings({RECEIVE: "off"}, receive=2).receive == 2

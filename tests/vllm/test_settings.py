"""What an operator may set, and what is said about the rest."""

from __future__ import annotations

import pytest

from trtllm_pp_progress.vllm import ReceiveSettings, SettingsError
from trtllm_pp_progress.vllm._settings import load_settings

RECEIVE, PLACEMENT = "TRTLLM_PP_PROGRESS_VLLM_RECEIVE", "TRTLLM_PP_PROGRESS_VLLM_PLACEMENT"


def test_off_is_the_default():
    """Without a word from the operator nothing is switched on."""
    assert load_settings({}) == ReceiveSettings(receive="off", placement="post-model", timing="on", stall_warning_s=8)


def test_the_switch_alone_is_rank_aware():
    """On means the policy that measured best, on every rank its own delay, after the model."""
    assert load_settings({RECEIVE: "on"}) == load_settings({RECEIVE: "rank-aware"})
    assert [load_settings({RECEIVE: "on"}).delay(rank, 4) for rank in range(3)] == [3, 2, 1]


@pytest.mark.parametrize("value", ["off", "rank-aware", "1", "7", " 3 "])
def test_one_variable_is_enough(value):
    """The receive variable alone selects a policy; its placement is then after the model."""
    settings = load_settings({RECEIVE: value})
    assert str(settings.receive) == value.strip()
    assert settings.placement == "post-model"


@pytest.mark.parametrize("value", ["0", "-1", "x", "", "1.5", "ON", "true", "1e3", "nan", "²", "True"])
def test_a_value_that_is_none_names_itself_and_the_valid_ones(value):
    """The error is raised when the variable is read, long before a step."""
    with pytest.raises(SettingsError) as error:
        load_settings({RECEIVE: value})
    assert f"{RECEIVE}={value!r}" in str(error.value)
    assert "off, on, rank-aware, or a delay in steps from 1 to pp_size - 1" in str(error.value)


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


@pytest.mark.parametrize("pp_size", [3, 4, 16])
def test_before_the_model_of_a_step_is_after_that_of_the_step_before(pp_size):
    """Nothing is queued in between; so a delay of 1 is where vLLM posts, and says so."""
    for receive in range(2, pp_size):
        assert load_settings(receive=receive, placement="pre-model").delay(0, pp_size) == receive - 1
    with pytest.raises(SettingsError, match=r"pre-model.*receive=1.*where vLLM posts.*from 2"):
        load_settings({RECEIVE: "1", PLACEMENT: "pre-model"})
    with pytest.raises(SettingsError, match=rf"RECEIVE={pp_size} "):
        load_settings(receive=pp_size, placement="pre-model").delay(0, pp_size)


def test_rank_aware_is_after_the_model():
    """Before the model a rank-aware delay would have no meaning, and says so."""
    with pytest.raises(SettingsError, match=r"pre-model.*rank-aware"):
        load_settings({RECEIVE: "rank-aware", PLACEMENT: "pre-model"})
    with pytest.raises(SettingsError, match="one of pre-model, post-model"):
        load_settings({PLACEMENT: "sideways"})


def test_an_argument_wins_over_the_environment():
    """Precedence is argument, environment, default."""
    assert load_settings({RECEIVE: "off"}, receive=2).receive == 2

"""How the policy gets into vLLM's processes, and how it stays out of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.v1.worker.worker_base import WorkerWrapperBase

import trtllm_pp_progress.vllm as receive
from trtllm_pp_progress.vllm import _install

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "TRTLLM_PP_PROGRESS_VLLM_RECEIVE"


def python(code, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRTLLM_PP_PROGRESS")}
    return subprocess.run(
        [sys.executable, "-c", code], env={**environment, "PYTHONPATH": str(ROOT), **variables}, capture_output=True,
        text=True, timeout=150, check=False,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """Leave no install and no refusal behind."""
    monkeypatch.delenv(VARIABLE, raising=False)
    stock = WorkerWrapperBase.init_device
    yield
    receive.uninstall()
    _install._refused.clear()
    monkeypatch.undo()
    assert WorkerWrapperBase.init_device is stock


def test_importing_and_being_off_imports_neither_torch_nor_vllm():
    """The entry point of a deployment that does not use the policy costs an import of this package's own modules."""
    child = python(
        "import sys\n"
        "from trtllm_pp_progress.vllm._install import register\n"
        "import trtllm_pp_progress.vllm as receive\n"
        "register()\n"
        "assert receive.status() == {'installed': False, 'refused': [], 'workers': []}\n"
        "print(sorted({'torch', 'vllm', 'numpy'} & set(sys.modules)))"
    )
    assert child.stdout.strip() == "[]", child.stderr


def test_off_leaves_vllm_untouched():
    """Off is the default, and installs nothing."""
    stock = WorkerWrapperBase.init_device
    assert receive.install().receive == "off"
    assert WorkerWrapperBase.init_device is stock
    assert not receive.installed()


def test_install_and_uninstall_in_any_order():
    """Twice is once, and uninstalling nothing is nothing."""
    stock = WorkerWrapperBase.init_device
    receive.uninstall()
    receive.install(receive="rank-aware")
    ours = WorkerWrapperBase.init_device
    receive.install(receive=1)
    assert WorkerWrapperBase.init_device is ours is not stock
    assert receive.installed()
    receive.uninstall()
    receive.uninstall()
    assert WorkerWrapperBase.init_device is stock


def test_a_worker_is_attached_after_its_device_is_initialised(monkeypatch):
    """The wrapper's own initialisation runs first, and its worker is what gets the policy."""
    order = []
    monkeypatch.setattr(WorkerWrapperBase, "init_device", lambda self: order.append("device"))
    monkeypatch.setattr(_install, "attach", lambda worker, settings: order.append((worker, settings.receive)))
    receive.install(receive=2)
    wrapper = object.__new__(WorkerWrapperBase)
    wrapper.worker = "the worker"
    wrapper.init_device()
    assert order == ["device", ("the worker", 2)]
    receive.uninstall()


def test_a_refused_worker_starts_stock_with_one_line(monkeypatch, caplog):
    """On a CPU machine, say: the reason is in the log and in status, once, and nothing is raised."""
    monkeypatch.setattr(WorkerWrapperBase, "init_device", lambda self: None)
    receive.install(receive=2)
    wrapper = object.__new__(WorkerWrapperBase)
    wrapper.worker = SimpleNamespace()
    wrapper.init_device()
    assert len(caplog.messages) == 1
    assert "stays off" in caplog.text
    assert len(receive.status()["refused"]) == 1
    receive.uninstall()


def test_what_nobody_expected_leaves_a_worker_stock(monkeypatch, caplog):
    """An error of the policy's own is logged, and the worker starts; the operator's mistake alone stops it."""
    monkeypatch.setattr(WorkerWrapperBase, "init_device", lambda self: "started")
    receive.install(receive=2)
    wrapper = object.__new__(WorkerWrapperBase)
    wrapper.worker = SimpleNamespace()
    monkeypatch.setattr(_install, "attach", lambda worker, settings: 1 / 0)
    assert wrapper.init_device() == "started"
    assert "ZeroDivisionError" in caplog.text

    def mistake(worker, settings):
        raise receive.SettingsError("RECEIVE=4 is not valid with pp_size=4")

    monkeypatch.setattr(_install, "attach", mistake)
    with pytest.raises(receive.SettingsError, match="pp_size=4"):
        wrapper.init_device()
    receive.uninstall()


def test_a_bad_value_keeps_vllm_from_starting(monkeypatch):
    """The entry point raises for the operator's mistake, with the value and the valid ones."""
    monkeypatch.setenv(VARIABLE, "x")
    with pytest.raises(receive.SettingsError, match=r"TRTLLM_PP_PROGRESS_VLLM_RECEIVE='x'.*rank-aware"):
        _install.register()


def test_anything_else_that_fails_leaves_vllm_stock(monkeypatch, caplog):
    """A vLLM without the class that is hooked starts as ever, and the log says why there is no policy."""
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.delattr("vllm.v1.worker.worker_base.WorkerWrapperBase")
    _install.register()
    assert "could not be installed" in caplog.text
    assert not receive.installed()


def test_the_settings_travel_to_ray_workers(monkeypatch):
    """Variables are copied by prefix there; switched on, this package's prefix is one of them."""
    from vllm.ray import ray_env

    prefixes = set(ray_env.DEFAULT_ENV_VAR_PREFIXES)
    monkeypatch.setattr(ray_env, "DEFAULT_ENV_VAR_PREFIXES", prefixes)
    monkeypatch.setenv(VARIABLE, "rank-aware")
    _install.register()
    assert VARIABLE in ray_env.get_env_vars_to_copy()


def test_a_worker_process_installs_by_its_environment():
    """Workers of one machine inherit the variable, and the entry point, called in each, then installs there."""
    child = python(
        "import trtllm_pp_progress.vllm as receive\n"
        "from trtllm_pp_progress.vllm._install import register\n"
        "register()\n"
        "print(receive.installed())",
        **{VARIABLE: "rank-aware"},
    )
    assert child.stdout.split() == ["True"], child.stderr


def test_the_public_names():
    """The subpackage is a short list."""
    assert receive.__all__ == [
        "ReceiveRefused", "ReceiveSettings", "SettingsError", "attach", "install", "installed", "status", "uninstall",
    ]  # fmt: skip

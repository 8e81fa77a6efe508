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
from trtllm_pp_progress.patching.patch import PatchError
from trtllm_pp_progress.vllm import installation, workers

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
    for name in [name for name in os.environ if name.startswith("TRTLLM_PP_PROGRESS")]:
        monkeypatch.delenv(name)
    stock = WorkerWrapperBase.init_device
    yield
    receive.uninstall()
    workers.STOOD_DOWN.clear()
    monkeypatch.undo()
    assert WorkerWrapperBase.init_device is stock


def test_importing_and_being_off_imports_neither_torch_nor_vllm():
    """The entry point of a deployment that does not use the policy costs an import of this package's own modules."""
    child = python(
        "import sys\n"
        "from trtllm_pp_progress.vllm.installation import register\n"
        "import trtllm_pp_progress.vllm as receive\n"
        "register()\n"
        "assert receive.status() == {'installed': False, 'waiting': None, 'stood_down': [], 'workers': []}\n"
        "print(sorted({'torch', 'vllm', 'numpy'} & set(sys.modules)))"
    )
    assert child.stdout.strip() == "[]", child.stderr


def test_off_leaves_vllm_untouched():
    """Off is the default, and installs nothing."""
    stock = WorkerWrapperBase.init_device
    assert receive.install().state == "off"
    assert WorkerWrapperBase.init_device is stock
    assert not receive.installed()


def test_install_and_uninstall_in_any_order(caplog):
    """Twice is once and says so, and uninstalling nothing is nothing."""
    stock = WorkerWrapperBase.init_device
    assert receive.uninstall() == []
    first = receive.install(receive="rank-aware")
    assert (first.state, first.target) == ("installed", "vllm.v1.worker.worker_base.WorkerWrapperBase")
    ours = WorkerWrapperBase.init_device
    assert receive.install(receive=1).state == "already installed"
    assert caplog.messages == ["already installed: nothing changed"]
    assert WorkerWrapperBase.init_device is ours is not stock
    assert receive.installed()
    assert receive.uninstall() == ["WorkerWrapperBase.init_device", "WorkerWrapperBase.receive_policy_status"]
    assert receive.uninstall() == []
    assert WorkerWrapperBase.init_device is stock


def test_an_installation_is_a_context():
    """At the end of the block what it did is undone, and no more: the inner one did nothing."""
    with receive.install(receive=2) as outer:
        with receive.install(receive=2) as inner:
            assert (outer.state, inner.state) == ("installed", "already installed")
        with receive.install(receive="off"):
            pass
        assert receive.installed()
    assert not receive.installed()


def test_settings_are_given_whole_or_one_by_one():
    """As in the core: not both."""
    settings = receive.Settings(receive=2)
    with receive.install(settings) as done:
        assert done.settings is settings
    with pytest.raises(receive.SettingsError, match="timing"):
        receive.install(settings, timing="off")


def test_a_patch_over_ours_stays():
    """Uninstalling refuses, with nothing changed, until what was put over it is gone."""
    receive.install(receive=2)
    ours = WorkerWrapperBase.init_device
    WorkerWrapperBase.init_device = theirs = lambda self: ours(self)
    with pytest.raises(PatchError, match="not ours"):
        receive.uninstall()
    assert receive.installed()
    assert WorkerWrapperBase.init_device is theirs
    WorkerWrapperBase.init_device = ours
    receive.uninstall()


def test_a_vllm_that_is_not_imported_is_waited_for():
    """Installing imports no vLLM; the class is patched once its module is there, and not after an uninstall."""
    child = python(
        "import sys\n"
        "import trtllm_pp_progress.vllm as receive\n"
        "print(receive.install(receive='on').state, receive.install(receive='on').state, sep='|')\n"
        "print(receive.status()['waiting'], receive.installed(), 'vllm' in sys.modules)\n"
        "receive.uninstall()\n"
        "print(receive.status()['waiting'])\n"
        "receive.install(receive='on')\n"
        "from vllm.v1.worker.worker_base import WorkerWrapperBase\n"
        "print(receive.status()['waiting'], receive.installed(), receive.install(receive='on').state)\n"
        "print(*receive.uninstall())"
    )
    assert child.stdout.splitlines() == [
        "waiting for the import of vllm.v1.worker.worker_base|already waiting for the import of "
        "vllm.v1.worker.worker_base",
        "vllm.v1.worker.worker_base False False",
        "None",
        "None True already installed",
        "WorkerWrapperBase.init_device WorkerWrapperBase.receive_policy_status",
    ], child.stderr


def test_a_worker_is_attached_after_its_device_is_initialised(monkeypatch):
    """The wrapper's own initialisation runs first, and its worker is what gets the policy."""
    order = []
    monkeypatch.setattr(WorkerWrapperBase, "init_device", lambda self: order.append("device"))
    monkeypatch.setattr(workers, "attach", lambda worker, settings: order.append((worker, settings.receive)))
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
    assert len(receive.status()["stood_down"]) == 1
    receive.uninstall()


def test_what_nobody_expected_leaves_a_worker_stock(monkeypatch, caplog):
    """An error of the policy's own is one line, and so is a delay that the pipeline does not allow."""
    monkeypatch.setattr(WorkerWrapperBase, "init_device", lambda self: "started")
    receive.install(receive=2)
    wrapper = object.__new__(WorkerWrapperBase)
    wrapper.worker = SimpleNamespace()
    monkeypatch.setattr(workers, "attach", lambda worker, settings: 1 / 0)
    assert wrapper.init_device() == "started"
    assert "ZeroDivisionError" in caplog.text

    def mistake(worker, settings):
        raise receive.SettingsError("RECEIVE=4 is not valid with pp_size=4")

    monkeypatch.setattr(workers, "attach", mistake)
    assert wrapper.init_device() == "started"
    assert caplog.records[-1].levelname == "ERROR"
    assert "pp_size=4" in caplog.messages[-1]
    assert "\n" not in caplog.messages[-1]
    receive.uninstall()


def test_a_bad_value_is_one_line(monkeypatch, caplog):
    """The entry point names the value and the valid ones at ERROR, and vLLM starts as it is; install() raises."""
    monkeypatch.setenv(VARIABLE, "x")
    installation.register()
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert f"{VARIABLE}='x'" in record.getMessage()
    assert "rank-aware" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert not receive.installed()
    assert receive.status()["stood_down"] == [record.getMessage().partition("as it was: ")[2]]
    with pytest.raises(receive.SettingsError, match=r"TRTLLM_PP_PROGRESS_VLLM_RECEIVE='x'.*rank-aware"):
        receive.install()


def test_a_misspelt_variable_is_one_line(monkeypatch, caplog):
    """Whoever believes the policy on is told, where nothing else would say a word."""
    monkeypatch.setenv("TRTLLM_PP_PROGRESS_VLLM_RECIEVE", "on")
    installation.register()
    (message,) = caplog.messages
    assert "TRTLLM_PP_PROGRESS_VLLM_RECIEVE is no setting" in message
    assert VARIABLE in message


def test_the_old_ray_executor_is_left_alone(monkeypatch, caplog):
    """It calls the model runner past the worker (to 0.32), so that steps and silences would not be seen."""

    class RayWorkerWrapper(WorkerWrapperBase):
        def execute_model_ray(self):
            raise AssertionError

    monkeypatch.setattr(WorkerWrapperBase, "init_device", lambda self: None)
    with receive.install(receive=2):
        wrapper = object.__new__(RayWorkerWrapper)
        wrapper.worker = SimpleNamespace()
        wrapper.init_device()
    (message,) = caplog.messages
    assert "past the worker" in message


def test_anything_else_that_fails_leaves_vllm_stock(monkeypatch, caplog):
    """A vLLM without the class that is hooked starts as ever, and the log says why there is no policy."""
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.delattr("vllm.v1.worker.worker_base.WorkerWrapperBase")
    installation.register()
    assert "could not be installed" in caplog.text
    assert not receive.installed()


def test_the_settings_travel_to_ray_workers(monkeypatch):
    """Variables are copied by prefix there; switched on, this package's prefix is one of them."""
    from vllm.ray import ray_env

    prefixes = set(ray_env.DEFAULT_ENV_VAR_PREFIXES)
    monkeypatch.setattr(ray_env, "DEFAULT_ENV_VAR_PREFIXES", prefixes)
    monkeypatch.setenv(VARIABLE, "rank-aware")
    installation.register()
    assert VARIABLE in ray_env.get_env_vars_to_copy()


def test_a_worker_process_installs_by_its_environment():
    """Workers of one machine inherit the variable, and the entry point, called in each, then installs there."""
    child = python(
        "import trtllm_pp_progress.vllm as receive\n"
        "from trtllm_pp_progress.vllm.installation import register\n"
        "register()\n"
        "import vllm.v1.worker.worker_base\n"
        "print(receive.installed())",
        **{VARIABLE: "rank-aware"},
    )
    assert child.stdout.split() == ["True"], child.stderr


def test_the_public_names():
    """The subpackage is a short list."""
    assert receive.__all__ == [
        "IncompatibleError", "Installation", "Settings", "SettingsError", "attach", "install", "installed", "status",
        "uninstall",
    ]  # fmt: skip

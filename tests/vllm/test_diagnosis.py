"""What the doctor says about vLLM: who loads the policy, who does not, and what is misspelt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trtllm_pp_progress.vllm.diagnosis import ENTRY, findings

ROOT = Path(__file__).resolve().parents[2]
RECEIVE = "TRTLLM_PP_PROGRESS_VLLM_RECEIVE"


def distribution(folder, name, version, entry=None, kind="dist-info"):
    """Lay a package's metadata down as pip, or an old develop install, does."""
    path = folder / (f"{name}-{version}.dist-info" if kind == "dist-info" else f"{name}.egg-info")
    path.mkdir(parents=True)
    file = "METADATA" if kind == "dist-info" else "PKG-INFO"
    (path / file).write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if entry:
        (path / "entry_points.txt").write_text(f"[vllm.general_plugins]\ntrtllm_pp_progress = {entry}\n")
    return str(folder)


@pytest.fixture
def site(tmp_path):
    """Return the path of an environment with vLLM 0.33.0 and the package installed."""
    folder = tmp_path / "site"
    distribution(folder, "vllm", "0.33.0")
    return distribution(folder, "trtllm_pp_progress", "0.1.0", ENTRY)


def ids(environ, *path):
    return [(found["id"], found["severity"]) for found in findings(environ, path)]


def a_process(code):
    """Run some code in a Python of its own, which has this package and nothing else from its environment."""
    return subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip


def test_a_good_start_says_so(site):
    """One line, which says what to look for."""
    (found,) = findings({RECEIVE: "on"}, [site])
    assert (found["id"], found["severity"]) == ("vllm-on", "info")
    assert "rank-aware" in found["means"]
    assert "receive policy attached" in found["do"]


def test_off_says_how_to_turn_it_on(site):
    """Without a word from the operator."""
    (found,) = findings({}, [site])
    assert found["id"] == "vllm-off"
    assert f"{RECEIVE}=on" in found["do"]


def test_nothing_is_said_where_vllm_is_not(tmp_path):
    """Neither here nor asked for; asked for, its absence is."""
    assert findings({"PATH": "/"}, [str(tmp_path)]) == []
    assert ids({RECEIVE: "on"}, str(tmp_path))[:1] == [("vllm-plugin-unseen", "error")]
    assert ("vllm-absent", "warning") in ids({RECEIVE: "on"}, str(tmp_path))


class TestCase69:
    """A plugin that nothing discovers (vllm-project/vllm#43987)."""

    def test_case_69_on_pythonpath_alone(self, tmp_path):
        """The package can be imported, and no plugin loader sees it."""
        site = distribution(tmp_path / "site", "vllm", "0.33.0")
        (found,) = findings({RECEIVE: "on"}, [str(ROOT / "nowhere"), site])
        assert (found["id"], found["severity"]) == ("vllm-plugin-unseen", "error")
        assert "nothing will load" in found["means"]
        assert "pip" in found["do"]

    @pytest.mark.parametrize("entry", [None, "trtllm_pp_progress.vllm._install:register"])
    def test_case_69_a_stale_egg_info_first(self, site, tmp_path, entry):
        """Of two copies the loader takes the first one's metadata."""
        old = distribution(tmp_path / "old", "trtllm_pp_progress", "0.0.9", entry, "egg-info")
        assert ids({RECEIVE: "on"}, old, site) == [("vllm-plugin-stale", "error")]
        assert ids({RECEIVE: "on"}, site, old) == [("vllm-on", "info")]

    @pytest.mark.parametrize("listed", ["other", "", "other, another"])
    def test_case_69_a_list_without_it(self, site, listed):
        """VLLM_PLUGINS, empty too, is a list of what may be loaded."""
        assert ids({RECEIVE: "on", "VLLM_PLUGINS": listed}, site) == [("vllm-plugin-unlisted", "error")]
        assert ids({RECEIVE: "on", "VLLM_PLUGINS": f"{listed},trtllm_pp_progress"}, site) == [("vllm-on", "info")]

    def test_case_69_vllms_own_loader_agrees(self):
        """What is called seen is what importlib, and so vLLM, finds in this very environment, and the reverse."""
        code = (
            "from importlib.metadata import entry_points\n"
            "from trtllm_pp_progress.vllm.diagnosis import findings\n"
            "seen = 'trtllm_pp_progress' in {e.name for e in entry_points(group='vllm.general_plugins')}\n"
            f"unseen = 'vllm-plugin-unseen' in {{f['id'] for f in findings({{{RECEIVE!r}: 'on'}})}}\n"
            "print(seen != unseen)"
        )
        child = a_process(code)
        assert child.stdout.strip() == "True", child.stderr


@pytest.mark.parametrize("name", ["TRTLLM_PP_PROGRESS_VLLM_RECIEVE", "TRTLLM_PP_PROGRES_VLLM_RECEIVE"])
def test_a_misspelt_variable_is_one_line(site, name):
    """It names what was probably meant; the core's own variables are none of it."""
    environ = {name: "on", "TRTLLM_PP_PROGRESS_STALL_WARNING_S": "5", "TRTLLM_PP_PROGRESS_MAX_POLLS": "5"}
    first, *rest = findings(environ, [site])
    assert (first["id"], first["severity"]) == ("vllm-variable", "error")
    assert name in first["means"]
    assert first["do"] == f"did you mean {RECEIVE}?"
    assert [found["id"] for found in rest] == ["vllm-off"]


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({RECEIVE: "onn"}, "onn"),
        ({RECEIVE: "on", "TRTLLM_PP_PROGRESS_VLLM_TIMING": "maybe"}, "maybe"),
        ({RECEIVE: "2", "TRTLLM_PP_PROGRESS_VLLM_PLACEMENT": "pre-model"}, "delay-(d - 1)"),
    ],
)
def test_a_bad_value_is_one_line(site, environ, named):
    """It names the value and the valid ones, and says that the policy stays off."""
    (found,) = findings(environ, [site])
    assert (found["id"], found["severity"]) == ("vllm-setting", "error")
    assert named in found["means"]
    assert "stays off" in found["means"]
    assert "\n" not in found["means"]


@pytest.mark.parametrize(
    ("environ", "release", "expected"),
    [
        ({"VLLM_USE_V2_MODEL_RUNNER": "0"}, "0.33.0", "vllm-runner"),
        ({}, "0.28.0", "vllm-runner"),
        ({"VLLM_PP_DEFER_SAMPLED_TOKEN_RECV": "3"}, "0.33.0", "vllm-defers-itself"),
        ({"VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "0"}, "0.32.0", "vllm-ray"),
        ({}, "0.40.0", "vllm-release"),
        ({}, "0.33.1rc2.dev5+gabc", None),
        ({"VLLM_USE_V2_MODEL_RUNNER": "1"}, "0.28.0", None),
        ({"VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "0"}, "0.33.0", None),
        ({"VLLM_PP_DEFER_SAMPLED_TOKEN_RECV": "0"}, "0.33.0", None),
    ],
)
def test_what_would_be_left_as_it_is(tmp_path, environ, release, expected):
    """A warning each, beside what a worker gets otherwise."""
    distribution(tmp_path, "vllm", release)
    path = distribution(tmp_path, "trtllm_pp_progress", "0.1.0", ENTRY)
    found = ids({RECEIVE: "on", **environ}, path)
    assert [name for name, severity in found if severity == "warning"] == ([expected] if expected else [])
    assert found[-1] == ("vllm-on", "info")


def test_one_hardware_queue_is_said(site):
    """With what it means for the delays."""
    found = {f["id"]: f for f in findings({RECEIVE: "on", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}, [site])}
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in found["vllm-queues"]["means"]
    assert "vllm-queues" not in {f["id"] for f in findings({RECEIVE: "on"}, [site])}


def test_watching_alone_is_said(site):
    """Nothing is deferred then."""
    (found,) = findings({RECEIVE: "watch"}, [site])
    assert found["id"] == "vllm-on"
    assert "left as they are" in found["means"]


def test_it_imports_neither_torch_nor_vllm():
    """The doctor's own process stays small."""
    code = (
        "import sys\n"
        "from trtllm_pp_progress.vllm.diagnosis import findings\n"
        f"findings({{{RECEIVE!r}: 'on', 'CUDA_DEVICE_MAX_CONNECTIONS': '1'}})\n"
        "print(sorted({'torch', 'vllm', 'numpy', 'click'} & set(sys.modules)))"
    )
    child = a_process(code)
    assert child.stdout.strip() == "[]", child.stderr

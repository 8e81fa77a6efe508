"""Where doors are: a folder for this user alone, and names that a pid used again does not have."""

import os
import stat
import subprocess
import sys

import pytest

from trtllm_pp_progress.door import place
from trtllm_pp_progress.door.place import DoorError, doors, make_folder, name_of, sweep


def gone():
    """Return the pid of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_the_folder_is_for_this_user_alone(umask, where):
    """Whatever the umask; made once, found again."""
    before = os.umask(umask)
    try:
        assert make_folder() == make_folder() == where
    finally:
        os.umask(before)
    assert stat.S_IMODE(where.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_that_others_may_enter_is_refused(mode, where):
    """It is named."""
    where.mkdir()
    where.chmod(mode)
    with pytest.raises(DoorError, match=f"{where} is not a folder of this user alone"):
        make_folder()


def test_a_folder_of_somebody_else_is_refused(where, monkeypatch):
    """Whoever made it first under our name."""
    make_folder()
    monkeypatch.setattr(place.os, "getuid", lambda: os.stat(where).st_uid + 1)
    with pytest.raises(DoorError, match="is not a folder of this user alone"):
        make_folder()


def test_a_link_or_a_file_in_its_place_is_refused(where, tmp_path):
    """A link leads wherever its maker likes."""
    (tmp_path / "other").mkdir(mode=0o700)
    where.symlink_to(tmp_path / "other")
    with pytest.raises(DoorError, match="is not a folder"):
        make_folder()
    where.unlink()
    where.touch()
    with pytest.raises(OSError, match="exists"):
        make_folder()


def test_without_a_runtime_directory_it_is_in_the_temporary_folder(monkeypatch, tmp_path):
    """Under a name with the user's id."""
    monkeypatch.undo()
    monkeypatch.setattr(place.os, "access", lambda *asked: False)
    monkeypatch.setattr(place.tempfile, "gettempdir", lambda: str(tmp_path))
    assert place.folder() == tmp_path / f"trtllm-pp-progress-{os.getuid()}"


def test_a_name_is_that_of_one_process():
    """None for one that is gone; the start time keeps apart who used a pid before."""
    assert name_of(os.getpid()).startswith(f"{os.getpid()}-")
    assert name_of(os.getpid()) == name_of(os.getpid())
    assert name_of(gone()) is None


def test_only_living_processes_have_doors(where):
    """One that is gone, one whose pid is another's by now, and a file that is no door are none; all of these go."""
    here = make_folder()
    ours = here / name_of(os.getpid())
    stale = [here / f"{gone()}-1.sock", here / here / "nonsense.sock"]
    stale += [here / f"{os.getpid()}-{start}.sock" for start in (1, 9 * 10**15)]  # the pid was another's before
    for path in [ours, *stale, here / "notes.txt"]:
        path.touch()
    assert doors() == {os.getpid(): ours}
    sweep(here)
    assert sorted(here.iterdir()) == sorted([ours, here / "notes.txt"])


def test_no_folder_is_no_doors(where):
    """Nothing is made by looking."""
    assert doors() == {}
    assert not where.exists()

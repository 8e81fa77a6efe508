"""SECURITY.md's promises about a process that serves, by the audit events of Python itself."""

import json
import socket
import tempfile

import pytest
import standin
from standin import MODULE, TESTS, run

# Noted: what goes out or stays behind. Modules are read from anywhere on sys.path; nothing else is.
WATCH = """
import json, os, sys
noted, off = [], False
OUTSIDE = ("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.spawn", "shutil.",
           "tempfile.", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate")
def watch(event, arguments):
    if off:
        return
    if event == "open":
        path, mode, flags = arguments
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        module = str(path).endswith((".py", ".pyc", ".so")) or ".dist-info" in str(path)
        if writes or not module:
            noted.append([event, str(path)])
    elif event == "socket.__new__":
        noted.append([event, f"family {arguments[1]}"])
    elif event.startswith(OUTSIDE):
        noted.append([event, repr(arguments)])
sys.addaudithook(watch)
"""
SERVE = f"""
import importlib
executor = importlib.import_module({MODULE!r}).PyExecutor()
class Done(tuple):
    def test(self): return True, None
    def wait(self): pass
for slot in range(2):
    executor.send_handles[slot] = Done()
    executor.wait_on_pp_send_handles(executor.send_handles, slot)
import trtllm_pp_progress
assert trtllm_pp_progress.installed()
trtllm_pp_progress.status()
"""
END = """
off = True
print(json.dumps(noted))
"""


QUOTA = ("/proc/self/mountinfo", "/proc/self/cgroup", "/sys/fs/cgroup/")  # what may be read: how many cores there are


def noted(code, places, tmp_path, door="0"):
    """Return what a process did that the promises are about: it serves, then runs `code`, then undoes the patch."""
    env = standin.environment(standin.write(tmp_path / "upstream"), TESTS, TRTLLM_PP_PROGRESS="1")
    undo = "import trtllm_pp_progress; assert trtllm_pp_progress.uninstall()\n"
    with tempfile.TemporaryDirectory(prefix="promises") as short:  # a Unix socket's path has at most 107 bytes
        env |= {"PYTHONDONTWRITEBYTECODE": "1", "TRTLLM_PP_PROGRESS_DOOR": door, "TMPDIR": short}
        found = json.loads(run([places.python, "-c", f"{WATCH}{SERVE}{code}\n{undo}{END}"], env).stdout)
    return [entry for entry in found if not (entry[0] == "open" and entry[1].startswith(QUOTA))]


def test_a_serving_process_reaches_nothing_outside(places, tmp_path):
    """No file but modules and the quota of cores, no socket, no process, from the first import to the last undoing."""
    assert noted("", places, tmp_path) == []


def test_the_door_is_all_that_leads_in(places, tmp_path):
    """A Unix socket, its folder, and the process's own start time for its name; tempfile tries the temporary folder."""
    found = noted("", places, tmp_path, door="1")
    here = ("trtllm-pp-progress", "/promises", f"family {int(socket.AF_UNIX)}", "/proc/")
    assert [entry for entry in found if not any(name in entry[1] for name in here)] == []
    assert {name for name, _ in found} <= {"open", "os.mkdir", "os.remove", "socket.__new__", "socket.bind"}
    assert "socket.bind" in {name for name, _ in found}


@pytest.mark.parametrize(
    ("code", "event"),
    [
        ("open('/dev/null', 'w').close()", "open"),
        ("open('/proc/self/status').close()", "open"),
        ("import socket; socket.socket().close()", "socket.__new__"),
        ("import subprocess; subprocess.run(['true'])", "subprocess.Popen"),
        ("os.system('true')", "os.system"),
        ("import collections, json", None),
    ],
    ids=["write", "read", "socket", "process", "shell", "nothing"],
)
def test_what_would_break_a_promise_would_be_seen(code, event, places, tmp_path):
    """Control: each kind is noted, and what does nothing is not."""
    found = [name for name, _ in noted(code, places, tmp_path)]
    assert (event in found) if event else (found == [])

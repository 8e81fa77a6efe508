"""`export` as a process: metrics over HTTP, whatever the engine's own metrics use."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from jobs import ROOT, no_rank

LIMIT_S = 60


@pytest.mark.parametrize("multiprocess", [False, True])
def test_it_serves_until_it_is_interrupted(multiprocess, tmp_path):
    """PROMETHEUS_MULTIPROC_DIR, which vLLM sets, makes no difference; a port that is taken is one line."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = [sys.executable, "-m", "trtllm_pp_progress", "export", "--port", str(port)]
        env = no_rank(**({"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)} if multiprocess else {}))
        refused = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert refused.returncode != 0
    assert refused.stderr.startswith(f"Error: port {port} of 127.0.0.1: ")
    with subprocess.Popen(line, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr.readline() == f"metrics on port {port}\n"
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT_S) as answer:
                assert "trtllm_pp_progress_info{" in answer.read().decode()
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 0
    assert os.listdir(tmp_path) == []

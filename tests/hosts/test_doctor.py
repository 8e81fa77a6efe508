"""The doctor under mpirun on two hosts, where the patch is turned on for the ranks of one host alone."""

import json
import sys
from pathlib import Path

import pytest
import standin

SCRIPT = Path(__file__).parent / "scripts" / "partly.sh"
DOCTOR = [sys.executable, "-m", "trtllm_pp_progress", "doctor"]


@pytest.mark.parametrize("as_json", [False, True])
def test_case_65_two_ranks_unpatched_are_2_of_4(hosts, tmp_path, as_json):
    """One screen, or one report, says who is not patched, where and why; exit code 1."""
    upstream = standin.write(tmp_path / "upstream")
    path = f"{upstream}:{standin.TESTS}"
    options = ["--json"] if as_json else []
    command = ["mpirun", "-n", 4, "bash", SCRIPT, "node.rack1", path, *DOCTOR, *options]
    done = hosts(2, *command, options=["--name", "node.rack%"], limit=100)
    assert done.returncode == 1, done.stdout
    said = "2 of 4 ranks are patched, not ranks 2/3 on node.rack2: TRTLLM_PP_PROGRESS is not set"
    assert said in done.stdout
    if as_json:
        whole = json.loads(done.stdout[done.stdout.index("{") : done.stdout.rindex("}") + 1])
        assert (whole["verdict"], whole["reason"]) == ("affected", said)
        assert [rank["report"]["tensorrt_llm"]["patched"] for rank in whole["ranks"]] == [True, True, False, False]
        assert {difference["what"] for difference in whole["differences"]} == {"TRTLLM_PP_PROGRESS"}
    else:
        assert done.stdout.count("affected: ") == 1
        assert "ranks 0/1 on node.rack1; 2/3 on node.rack2" in " ".join(done.stdout.split())


def test_with_all_patched_it_says_so_once(hosts, tmp_path):
    """Control: exit code 0."""
    path = f"{standin.write(tmp_path / 'upstream')}:{standin.TESTS}"
    done = hosts(2, "mpirun", "-n", 2, "bash", SCRIPT, "*", path, *DOCTOR, options=["--slots", 1], limit=100)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("cured: ") == 1
    assert "ranks differ in" not in done.stdout

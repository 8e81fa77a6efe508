"""Upstream's performance case on the best engine present, as a test and as a command.

    mpirun -n 4 python -m pytest perf/test_perf.py                      # the published case
    mpirun -n 4 python perf/test_perf.py --engine host-cpu              # without pytest
    python perf/test_perf.py CASE --requests 4 --output 200 --json result.json      # starts mpirun itself

As a test it takes the same command line in one option: --perf="--engine host-cpu". A failing rank ends the run for
all; a run that proves nothing is skipped as a test. docs/measuring.md says what is measured and what is not.
"""

from __future__ import annotations

import pytest

from case.command import command, execute, options_from
from case.ids import parse
from trtllm_pp_progress.tools.job.options import run_command


def test_perf(perf_case: str, perf_arguments: list[str]) -> None:
    """Every relay gives the unsplit model's tokens; the patch is above upstream's threshold, the regression below."""
    line = [perf_case, *perf_arguments]
    options = options_from(line)
    found = execute(parse(options.pop("case_id")), line, **options)
    assert found.failures == []
    if found.inconclusive:
        pytest.skip(f"INCONCLUSIVE: {'; '.join(found.inconclusive)}")


if __name__ == "__main__":
    run_command(command)

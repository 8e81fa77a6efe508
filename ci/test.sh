#!/usr/bin/env bash
# Set up and run every check and test, quickest first. One command, as CI and developers run it. Usage: ci/test.sh
set -euo pipefail
cd "$(dirname "$0")/.."
step() { echo; echo "== $1 ($SECONDS s)"; }

step "set-up and checks"
bash ci/setup.sh openmpi
bash ci/check.sh
python=.venv/openmpi/bin/python

step "unit tests, and clean interpreters"
"$python" -m pytest tests/unit tests/process -q -n 2

step "under mpirun: Open MPI, 2, 3 and 4 ranks"
for ranks in 2 3 4; do
    PYTHON=$python ci/mpi.sh "$ranks" 300 -m pytest tests/mpi --with-mpi --np "$ranks" -x -q
done

# vLLM's environment is made meanwhile: downloads and deadlines are waited for together.
set -m  # a process group of its own, to be ended as one
bash ci/setup-vllm.sh </dev/null >.venv/setup-vllm.log 2>&1 &
vllm=$!
set +m
trap 'kill -- -$vllm 2>/dev/null || true' EXIT

step "starting mpirun: hangs, deadlines, the command line"
"$python" -m pytest tests/launch -q -n 4

step "the native understudy, under a thread sanitizer"
bash ci/tsan.sh
"$python" -m pytest tests/native -q

step "a real model cut into stages"
"$python" -m pytest tests/perf -q -n 2

step "upstream's performance case, scaled for a CPU"
PYTHON=$python ci/mpi.sh 4 180 -m pytest perf/test_perf.py -q --perf-engine host-cpu

step "MPICH, 2 ranks"
bash ci/setup.sh mpich
PYTHON=.venv/mpich/bin/python ci/mpi.sh 2 300 -m pytest tests/mpi --with-mpi --np 2 -x -q

step "vLLM's own handler"
wait "$vllm" || { cat .venv/setup-vllm.log; exit 1; }
trap - EXIT
bash ci/test-vllm.sh

step "all passed"

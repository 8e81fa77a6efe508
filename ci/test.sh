#!/usr/bin/env bash
# Set up, run every check and test, quickest first, and sum up: what CI runs, and what a developer runs.
# Usage: ci/test.sh          everything, about 20 minutes on two cores
#        ci/test.sh quick    what one runs while working, about 3: checks, unit tests, clean interpreters, three ranks,
#                            and one start of mpirun of each kind
# A failing step does not keep the others from running. Exits 0 if nothing failed; the last line is the sum.
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-all} in
all) total=13 ;;
quick) total=5 ;;
*) sed -n '3,6s/^# //p' "$0" >&2; exit 2 ;;
esac
results=$PWD/.venv/results
python=$PWD/.venv/openmpi/bin/python
last=$results/last # `slug seconds` of each step's last run
mkdir -p "$results"
rm -f "$results"/*.xml "$results"/*.done "$results/steps"
failed=0 number=0 others= running=

# step SLUG NAME COMMAND...: run it, and note how long it took and how it ended.
step() {
    local slug=$1 name=$2 began=$SECONDS rc=0 before
    shift 2
    number=$((number + 1))
    before=$(awk -v slug="$slug" '$1 == slug { print ", " $2 " s last time" }' "$last" 2>/dev/null || true)
    echo
    echo "== $number/$total $name ($SECONDS s so far$before)"
    running="$slug 0 130 $name, interrupted"
    ("$@") || rc=$?
    running=
    echo "$slug $((SECONDS - began)) $rc $name" >>"$results/steps"
    { grep -v "^$slug " "$last" 2>/dev/null || true; echo "$slug $((SECONDS - began))"; } >"$last.new"
    mv "$last.new" "$last"
    if [ "$rc" -ne 0 ]; then failed=1; fi
}

finish() {
    local rc=$?
    trap - EXIT
    if [ -n "$others" ]; then kill -- "-$others" 2>/dev/null || true; fi
    if [ -n "$running" ]; then echo "$running" >>"$results/steps"; fi
    echo
    echo "== $SECONDS s"
    "$python" ci/summary.py "$results" || python3 ci/summary.py "$results"
    exit $((rc ? rc : failed))
}
trap finish EXIT

tests() { "$python" -m pytest -q -r fE --junit-xml "$results/$1.xml" "${@:2}"; }
ranks() { # RANKS SECONDS RANK_VARIABLE SLUG ARGUMENTS...; pytest itself puts each rank's number into its file's name
    ci/mpi.sh "$1" "$2" -m pytest -q -r fE --junit-xml "$results/$4-\${$3}.xml" "${@:5}"
}
mpi() { # RANKS...
    local rc=0 n
    for n in "$@"; do
        PYTHON=$python ranks "$n" 300 OMPI_COMM_WORLD_RANK "mpi-$n" tests/mpi --with-mpi --np "$n" -x || rc=$?
    done
    return "$rc"
}
native() { bash ci/tsan.sh && tests native tests/native; }
model() { needs_model && tests perf tests/perf -n 2; }
case_on_cpu() { needs_model && PYTHON=$python ranks 4 180 OMPI_COMM_WORLD_RANK case perf/test_perf.py --perf="--engine host-cpu"; }
made() { # NAME: wait until that environment has been made, or could not be
    while [ ! -f "$results/$1.done" ] && kill -0 "$others" 2>/dev/null; do sleep 1; done
    [ -f "$results/$1.done" ] || { echo "not run: .venv/$1 could not be made"; cat "$results/others.log"; return 1; }
}
needs_model() {
    "$python" -c "import gguf, torch, transformers" || { echo "not run: bash ci/setup.sh openmpi has to succeed"; return 1; }
}
mpich() {
    PYTHON=.venv/mpich/bin/python ranks 2 300 PMI_RANK mpich tests/mpi --with-mpi --np 2 -x
}
hosts() { tests hosts tests/hosts -n 2; }
release() { made release && tests release tests/release -n 2; }
row() { made release && bash ci/matrix.sh lowest; }
vllm() {
    made vllm && bash ci/test-vllm.sh -r fE --junit-xml "$results/vllm.xml"
}
ONE_OF_EACH=(
    tests/launch/test_bench_cli.py::test_a_tiny_run_writes_the_documented_rows
    "tests/launch/test_eras.py::test_a_receiver_that_has_left_costs_the_deadline_in_every_era[2]"
    tests/launch/test_mpi_session.py::test_a_session_in_which_a_test_passed_passes
    tests/launch/test_probe_cli.py::test_one_rank_alone_can_tell_nothing
    tests/launch/test_readme.py::test_python_blocks_run
    tests/launch/test_scenarios.py::test_a_schedule_that_parks_is_driven_although_nobody_re_enters_mpi
    "tests/launch/test_shutdown_hang.py::test_a_receiver_that_has_left_costs_the_deadline_and_is_reported[2-1-patched]"
    tests/launch/test_ways_in.py::test_workers_of_a_pool_that_the_launcher_started_are_patched
)

step setup "set-up" bash ci/setup.sh openmpi
if [ "$failed" = 1 ]; then exit; fi
step checks "style, types, spelling" bash ci/check.sh
step unit "unit tests, and clean interpreters" tests unit tests/unit tests/process -n 3
if [ "$total" = 5 ]; then
    step mpi "under mpirun: Open MPI, 3 ranks" mpi 3
    step launch "starting mpirun: one of each kind" tests launch "${ONE_OF_EACH[@]}" -n 4
    exit
fi
step mpi "under mpirun: Open MPI, 2, 3 and 4 ranks" mpi 2 3 4
# Tests of launchers start both MPIs', so the other one is there before them, and whole.
bash ci/setup.sh mpich || failed=1

# The other environments are made meanwhile: downloads and deadlines are waited for together.
set -m # a process group of its own, to be ended as one
(bash ci/setup.sh release && touch "$results/release.done"
 bash ci/setup-vllm.sh && touch "$results/vllm.done") </dev/null >"$results/others.log" 2>&1 &
others=$!
set +m

step launch "starting mpirun: hangs, deadlines, the command line" tests launch tests/launch -n 4
step native "the native thread, under a thread sanitizer" native
step perf "a real model cut into stages" model
step case "upstream's performance case, scaled for a CPU" case_on_cpu
step mpich "MPICH, 2 ranks" mpich
step hosts "across hosts, made of namespaces" hosts
step release "a release, its wheels, README's install lines" release
step row "the wheel with the lowest releases of all that it needs" row
step vllm "vLLM's own handler" vllm

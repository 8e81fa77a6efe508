#!/usr/bin/env bash
# Upstream's performance case with the relay of every era, each without the patch and with it, at 1, 8 and 32 requests in
# flight: three jobs, their policies interleaved, two neighbours a pair. PYTHON needs torch, mpi4py and, for era I's thread,
# a C compiler; nothing is installed. Tables on stdout, results in FOLDER. Exits with the worst verdict: 1 failed, 3
# inconclusive. LOADS are requests in flight, each a job; SECONDS_EACH is how long the rounds of a job may take beside its
# start. Usage: [PYTHON=python3] [LOADS="1 8 32"] [SECONDS_EACH=130] ci/case-matrix.sh FOLDER [OPTION OF test_perf.py...]
#   ci/case-matrix.sh /tmp/matrix                     one GPU that four ranks share: under 10 minutes
#   ci/case-matrix.sh /tmp/matrix --engine host-cpu --scale 0.003 --host-work-ms 0.5
set -euo pipefail
if [ $# -lt 1 ]; then
    sed -n '2,8s/^# //p' "$0" >&2
    exit 2
fi
folder=$(realpath -m "$1")
shift
cd "$(dirname "$0")/.."
mkdir -p "$folder"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
policies=flush,regressed,patched,iprobe,iprobe+patch,native,native+patch
policies+=,inline-f,inline-f+patch,inline-g,inline-g+patch,inline-h,inline-h+patch,inline-i,inline-i+patch

worst=0
declare -A requests=([1]=2 [8]=8 [32]=32) output=([1]=80 [8]=40 [32]=24)
for concurrency in ${LOADS:-1 8 32}; do
    case=qwen3_0.6b-bench-pytorch-bfloat16-maxbs:512-maxnt:2048-input_output_len:8000,1000-reqs:256
    rc=0
    "${PYTHON:-python3}" perf/test_perf.py "$case-con:$concurrency-pp:4-gpus:4" --requests "${requests[$concurrency]}" \
        --output "${output[$concurrency]}" --host-work-ms 0.7 --policies "$policies" --check pairs --repeat 20 \
        --seconds "${SECONDS_EACH:-130}" --timeout 400 --json "$folder/concurrency-$concurrency.json" "$@" || rc=$?
    echo "== $concurrency in flight: exit code $rc, $SECONDS s so far"
    case $rc in
    0) ;;
    3) if [ "$worst" = 0 ]; then worst=3; fi ;;
    *) worst=1 ;;
    esac
done
exit "$worst"

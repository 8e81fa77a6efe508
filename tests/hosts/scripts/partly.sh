#!/usr/bin/env bash
# Run COMMAND with PATHS in front of PYTHONPATH, and with the patch turned on where the hostname matches HOST.
# Usage: partly.sh HOST PATHS COMMAND...
set -euo pipefail
# shellcheck disable=SC2053
if [[ $(hostname) == $1 ]]; then export TRTLLM_PP_PROGRESS=1; fi
export PYTHONPATH=$2
shift 2
exec "$@"

#!/usr/bin/env bash
# Run COMMAND with its output in the file LOG. If it fails, name it and show what went wrong; exits as it did.
# Usage: ci/quiet.sh LOG COMMAND...
set -uo pipefail
log=$1
shift
mkdir -p "$(dirname "$log")"
"$@" >"$log" 2>&1 </dev/null
rc=$?
if [ "$rc" -ne 0 ]; then
    echo "failed with exit code $rc, all it said is in $log; to try again: $*" >&2
    # pip warns of every folder on its list that is not there, and tells each time of a newer pip.
    grep -v "^WARNING: Location .* is ignored\|^\[notice\]" "$log" | tail -n 12 >&2
fi
exit "$rc"

#!/usr/bin/env bash
# Run a shell command on a host of the bed that this was called in, as ssh would: with a login's variables alone, but with
# all of them where HOSTS_KEEP is set. HOST is a number, or an address or a name that ends in it; 0 is the switch, with an
# interface port1 to host 1.
# Usage: enter.sh HOST COMMAND...
set -euo pipefail
while [[ ${1:-} == -* ]]; do shift; done  # ssh's options
read -ra pids <<<"$HOSTS_PIDS"
pid=${pids[${1##*[!0-9]}]}
shift
export TMPDIR=/dev/shm/tmp
if [ -n "${HOSTS_KEEP:-}" ]; then
    line=(env -u HOSTS_KEEP sh -c "$@")
else
    kept=()
    for variable in PATH HOME USER LANG TMPDIR "${!HOSTS_@}"; do
        if [ -n "${!variable:-}" ]; then kept+=("$variable=${!variable}"); fi
    done
    line=(env -i "${kept[@]}" sh -c "$*")
fi
exec nsenter -t "$pid" --net --uts --ipc --mount --time "${line[@]}"

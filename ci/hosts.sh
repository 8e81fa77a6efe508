#!/usr/bin/env bash
# Run COMMAND on the first of N hosts that this machine is made to look like: each with a network, a hostname, an
# /etc/hosts as Debian writes it (its name is 127.0.1.1, no other name is known), a /dev/shm and a monotonic clock of its
# own, an hour apart. mpirun and mpiexec find all of them, SLOTS ranks each, and reach them as they would by ssh: with a
# login's variables alone. As root or not; everything is gone when it ends, however that comes about.
# LOSS (%), DELAY (ms, one way) and RATE (Mbit/s out of a host) are what the switch between the hosts adds. NAME is their
# hostname, % in it the number of the host. COMMAND finds HOSTS_ADDRESSES and HOSTS_ENTER, which runs a shell command on a
# host ($HOSTS_ENTER 2 "ip addr"; 0 is the switch). Exits as COMMAND does, with 77 where this machine lacks something.
# Usage: ci/hosts.sh N [--slots SLOTS] [--name NAME] [--loss LOSS] [--delay DELAY] [--rate RATE] -- COMMAND...
# e.g.   ci/hosts.sh 2 --delay 1 -- trtllm-pp-progress bench --pp 4 --transport default
set -euo pipefail
cannot=77
here=$(cd "$(dirname "$0")" && pwd)/hosts

bad() { echo "ci/hosts.sh: $1" >&2; sed -n 's/^# Usage: /usage: /p' "$0" >&2; exit 2; }
lacks() { echo "ci/hosts.sh: no hosts can be made here: $1" >&2; exit $cannot; }

hosts=${1:-}
[[ $hosts =~ ^[0-9]+$ && $hosts -ge 1 && $hosts -le 64 ]] || bad "N is '$hosts': valid are 1 to 64"
shift
export HOSTS_SLOTS=2 HOSTS_NAME=host% HOSTS_LOSS=0 HOSTS_DELAY=0 HOSTS_RATE=0
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    case $1 in
    --slots | --loss | --delay | --rate)
        [[ ${2:-} =~ ^[0-9]+(\.[0-9]+)?$ ]] || bad "$1 is '${2:-}': valid are numbers from 0" ;;
    --name) [[ ${2:-} =~ ^[A-Za-z0-9.%-]+$ ]] || bad "$1 is '${2:-}': valid are hostnames" ;;
    *) bad "unknown option '$1'" ;;
    esac
    option=${1#--}
    declare "HOSTS_${option^^}=$2"
    shift 2
done
[ $# -ge 2 ] || bad "there is no COMMAND after --"
shift

PATH=$PATH:/usr/sbin:/sbin
for tool in unshare:util-linux nsenter:util-linux setpriv:util-linux ip:iproute2 python3:python3; do
    [ -x "$(command -v "${tool%:*}")" ] || lacks "${tool%:*} is not installed (Debian: apt-get install ${tool#*:})"
done
# In namespaces of processes and mounts of its own the bed ends, to the last mount, with its first process.
own=(--mount --net --pid --ipc --uts --fork --mount-proc --kill-child)
if [ "$(id -u)" -ne 0 ]; then own+=(--user --map-root-user); fi
refused=$(unshare "${own[@]}" unshare --time --fork true 2>&1) || lacks "namespaces are refused (${refused##*: })"

setpriv --pdeathsig KILL unshare "${own[@]}" bash "$here/bed.sh" "$hosts" "$@" <&0 &
bed=$!
trap 'if [ -n "$bed" ]; then kill -KILL "$bed"; wait "$bed" || true; fi 2>/dev/null' EXIT
trap 'exit 143' TERM
trap 'exit 130' INT
trap 'exit 129' HUP
rc=0
wait "$bed" || rc=$?
bed=  # its number may be another process's by now
exit "$rc"

#!/usr/bin/env bash
# Make the namespaces that this runs in a host of a bed, say its process id, and stay: bed.sh starts it.
# Usage: host.sh NAME
set -euo pipefail
name=$1
hostname "$name"
mount -t sysfs sysfs /sys || { echo "/sys cannot be mounted"; exit 1; }  # UCX looks for networks there
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mkdir -m 1777 /dev/shm/tmp
printf '127.0.0.1\tlocalhost\n127.0.1.1\t%s %s\n' "$name" "${name%%.*}" >/dev/shm/tmp/hosts
mount --bind /dev/shm/tmp/hosts /etc/hosts
echo $$
exec sleep infinity >/dev/null 2>&1

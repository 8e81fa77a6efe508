#!/usr/bin/env bash
# Give every host of the bed a network of its own with one and the same address, as docker0 has, and run a command.
# Usage: docker0.sh COMMAND...
set -euo pipefail
for address in $HOSTS_ADDRESSES; do
    "$HOSTS_ENTER" "$address" "ip link add docker0 type veth peer name docker1; ip addr add 172.17.0.1/16 dev docker0;
        ip link set docker0 up; ip link set docker1 up"
done
exec "$@"

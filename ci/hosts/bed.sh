#!/usr/bin/env bash
# The first process of a bed of hosts, in namespaces of its own: ci/hosts.sh starts it and says what it makes.
# Usage: bed.sh N COMMAND...
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
hosts=$1
shift
net=10.77.0  # seen by nobody outside
lacks() { echo "ci/hosts.sh: no hosts can be made here: $1" >&2; exit 77; }

on_each() { for ((host = 1; host <= hosts; host++)); do HOSTS_KEEP=1 bash "$HOSTS_ENTER" $host 'exec "$0" "$@"' "$@" || return; done; }

ip link set lo up
export HOSTS_PIDS=$$ HOSTS_ADDRESSES='' HOSTS_ENTER=$here/enter.sh
for ((host = 1; host <= hosts; host++)); do
    clock=$(((host - 1) * 3600))
    exec {made}< <(exec unshare --net --uts --ipc --mount --time --monotonic $clock --boottime $clock --fork --kill-child \
        bash "$here/host.sh" "${HOSTS_NAME//%/$host}" 2>&1)
    read -r pid <&$made || true
    [[ $pid =~ ^[0-9]+$ ]] || lacks "$pid"
    HOSTS_PIDS+=" $pid" HOSTS_ADDRESSES+=" $net.$host"
    ip link add "port$host" type veth peer name eth0 netns "$pid" 2>/dev/null || lacks "the kernel has no veth"
    ip link set "port$host" up
    nsenter -t "$pid" --net sh -c "ip link set lo up; ip addr add $net.$host/24 dev eth0; ip link set eth0 up"
done
HOSTS_ADDRESSES=${HOSTS_ADDRESSES# }

if [ "$HOSTS_LOSS $HOSTS_DELAY $HOSTS_RATE" = "0 0 0" ]; then
    ip link add switch type bridge 2>/dev/null || lacks "the kernel has no bridge"
    for ((host = 1; host <= hosts; host++)); do ip link set "port$host" master switch; done
    ip link set switch up
else
    # Split by the sender, for what is lost is a segment.
    if [ "$HOSTS_LOSS" != 0 ]; then on_each ip link set eth0 gso_max_segs 1; fi
    python3 "$here/switch.py" "$hosts" "$HOSTS_LOSS" "$HOSTS_DELAY" "$HOSTS_RATE" &
fi
# A link is up some time after it was told to be.
on_each sh -c 'for try in $(seq 100); do grep -q up /sys/class/net/eth0/operstate && exit; sleep 0.05; done; exit 1' ||
    lacks "a link does not come up"

# Both launchers: where the hosts are, how to get there, which network to use.
lines() { for address in $HOSTS_ADDRESSES; do echo "$address$1$HOSTS_SLOTS"; done; }
open_mpi=/dev/shm/tmp/hostfile mpich=/dev/shm/tmp/machinefile
lines " slots=" | bash "$HOSTS_ENTER" 1 "cat >$open_mpi"
lines ":" | bash "$HOSTS_ENTER" 1 "cat >$mpich"
export PRTE_MCA_plm_ssh_agent=$HOSTS_ENTER PRTE_MCA_prte_if_include=$net.0/24 PRTE_MCA_prte_default_hostfile=$open_mpi
export PRTE_MCA_rmaps_default_mapping_policy=slot
# Open MPI takes node.rack1 and node.rack2 for one host otherwise, and hangs in MPI_Init.
export PRTE_MCA_prte_keep_fqdn_hostnames=1 PMIX_MCA_pmix_keep_fqdn_hostnames=1
# Hosts share the machine's cores, which Open MPI does not know: it would spin on them.
export OMPI_MCA_mpi_yield_when_idle=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export HYDRA_LAUNCHER=ssh HYDRA_LAUNCHER_EXEC=$HOSTS_ENTER HYDRA_HOST_FILE=$mpich HYDRA_IFACE=eth0
HOSTS_KEEP=1 bash "$HOSTS_ENTER" 1 'cd "$0" && exec "$@"' "$PWD" "$@"

#!/usr/bin/env bash
# Run `PYTHON ARGUMENTS` on RANKS ranks of the MPI that belongs to PYTHON (Open MPI or MPICH), over UCX/TCP, as root or
# not. Exits as the launcher does, or with 124 if the deadline ended it.
# FABRIC is what UCX may use instead of TCP. With SURVIVE=1 the other ranks of Open MPI go on when one is killed.
# Usage: [PYTHON=python3] ci/mpi.sh RANKS SECONDS ARGUMENTS...      e.g.  ci/mpi.sh 4 300 -m pytest tests/mpi --with-mpi -x
set -euo pipefail
if [ $# -lt 3 ]; then
    sed -n '2,5s/^# //p' "$0" >&2
    exit 2
fi
ranks=$1 seconds=$2
shift 2
python=$(command -v "${PYTHON:-python3}") || { echo "ci/mpi.sh: ${PYTHON:-python3} was not found" >&2; exit 2; }

# A launcher of another MPI starts that many lonely ranks, so the one beside this Python comes first.
PATH=$(dirname "$python"):$PATH
mpirun=$(command -v mpirun || command -v mpiexec) || { echo "ci/mpi.sh: mpirun was not found" >&2; exit 2; }
export UCX_TLS=${FABRIC:-tcp,self}
line=("$mpirun" -n "$ranks")
case $("$mpirun" --version) in
*"Open MPI"* | *OpenRTE* | *PRRTE* | *prte*)
    # Unless told otherwise, Open MPI takes UCX on InfiniBand only, spins with all its might, and binds each of two ranks,
    # with all its threads, to one core.
    export OMPI_MCA_mpi_yield_when_idle=1
    line+=(--oversubscribe --bind-to none --mca pml ucx --mca opal_common_ucx_tls any --mca opal_common_ucx_devices any -x UCX_TLS)
    if [ "${SURVIVE:-0}" = 1 ]; then line+=(--continuous); fi
    if [ "$(id -u)" -eq 0 ]; then
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    fi
    ;;
*)
    # MPICH speaks to its own node by shared memory of its own, unless told otherwise.
    export MPIR_CVAR_NOLOCAL=1
    ;;
esac
exec timeout --kill-after=15 "$seconds" "${line[@]}" "$python" "$@" </dev/null

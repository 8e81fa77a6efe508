#!/usr/bin/env bash
# As upstream's launcher for several nodes does (NVIDIA/TensorRT-LLM, trtllm-llmapi-launch): rank 0 runs the command in a
# sub-shell without the variables of MPI and is itself the leader; the others are workers.
# Usage: mpirun ... leader.sh PYTHON WORKER COMMAND...
python=$1 worker=$2
shift 2
if [ "$OMPI_COMM_WORLD_RANK" = 0 ]; then
    (
        for name in $(compgen -e); do
            case $name in
            OMPI_* | PMIX_* | PMI_* | SLURM_* | MPI_* | UCX_* | I_MPI_* | HYDRA_* | KMP_* | MPICH_* | MV2_* | CRAY_*)
                unset "$name" ;;
            esac
        done
        exec "$@"
    ) &
fi
"$python" "$worker"
code=$?
wait || code=1
exit $code

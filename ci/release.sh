#!/usr/bin/env bash
# Make a release and check it: sdist and wheels built twice with the same bytes; names, version, tag, contents, and an
# install without a compiler (ci/check_release.py); the Arm wheel on an emulated Arm (ci/arm.sh). Uploads nothing.
# Usage: ci/release.sh [FOLDER [COMMIT]]      default: dist HEAD
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-dist} commit=${2:-HEAD}
[ -n "${2:-}" ] || git diff --quiet HEAD || echo "ci/release.sh: what is not committed is left out" >&2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

bash ci/build.sh "$work/built" "$commit"
bash ci/build.sh "$work/again" "$commit"
diff -r "$work/built" "$work/again"
mkdir "$work/source"
git archive "$commit" | tar -x -C "$work/source"
.venv/release/bin/python ci/check_release.py "$work/source" "$work/built" "$(git tag --points-at "$commit" "v*")"
bash ci/arm.sh "$work"/built/*_aarch64.whl || [ $? -eq 77 ]

rm -f "$folder"/trtllm_pp_progress-*
mkdir -p "$folder"
mv "$work"/built/* "$folder"
echo "fit for release, in $folder:"
(cd "$folder" && sha256sum trtllm_pp_progress-*)

#!/usr/bin/env bash
# Build the sdist, and from it, for each processor, a wheel with the native part, for glibc 2.28 or later and every Python.
# Taken is COMMIT alone; the same commit gives the same bytes. zig compiles C for a chosen processor and glibc.
# Usage: ci/build.sh FOLDER [COMMIT]      default: HEAD
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(realpath -m "$1") commit=${2:-HEAD}
bash ci/setup.sh release
python=$PWD/.venv/release/bin/python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
umask 022
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct "$commit")
export SOURCE_DATE_EPOCH ZIG_GLOBAL_CACHE_DIR=$PWD/.venv/release/zig LC_ALL=C TZ=UTC

build() { # FORMAT SOURCE ARGUMENTS...
    bash ci/quiet.sh "$work/log" "$python" -m build --no-isolation "--$1" --outdir "$work/built" "${@:3}" "$2"
}

mkdir "$work/source"
git archive "$commit" | tar -x -C "$work/source"
build sdist "$work/source"
sdist=$(basename "$work"/built/*.tar.gz)
tar -xzf "$work/built/$sdist" -C "$work"
# Packed again: setuptools keeps the times and owners of the files.
tar -c --sort=name --format=gnu --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner \
    -C "$work" "${sdist%.tar.gz}" | gzip -9n >"$work/built/$sdist"

for processor in x86_64 aarch64; do
    mkdir "$work/$processor"
    tar -xzf "$work/built/$sdist" -C "$work/$processor"
    export CC="$python -m ziglang cc -target $processor-linux-gnu.2.28"
    CFLAGS="-O2 -fPIC" LDFLAGS="" LDSHARED="$CC -shared -s" \
        build wheel "$work/$processor/${sdist%.tar.gz}" "-C--build-option=--plat-name=manylinux_2_28_$processor"
done
mkdir -p "$folder"
mv "$work"/built/* "$folder"

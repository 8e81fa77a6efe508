#!/usr/bin/env bash
# Prove on an emulated Arm processor that the wheel's native part loads there, by `doctor`, and that its thread does its
# work, by the stress driver. Debian's Python for Arm and its emulator are unpacked under .venv/arm, nothing is installed.
# Usage: ci/arm.sh WHEEL      exit code 77: the emulator or Arm's Python cannot be had here
set -euo pipefail
cd "$(dirname "$0")/.."
wheel=$(realpath "$1")
bash ci/setup.sh release
bin=$PWD/.venv/release/bin arm=$PWD/.venv/arm
root=$arm/root
export ZIG_GLOBAL_CACHE_DIR=$PWD/.venv/release/zig

exec 9>.venv/arm.lock # two at a time would unpack over each other
flock 9

unavailable() {
    echo "ci/arm.sh: not run on Arm: $1" >&2
    exit 77
}

if [ ! -f "$arm/complete" ]; then
    { command -v apt-get && command -v dpkg-deb; } >/dev/null || unavailable "this is not Debian"
    rm -rf "$arm"
    mkdir -p "$arm"/{state/lists,cache/archives}/partial "$root"
    touch "$arm/status"
    host=$(dpkg --print-architecture)
    # apt with lists and a cache of its own, for both processors: needs no root and changes nothing outside.
    apt=(timeout 300 apt-get -qq -o Dir::State="$arm/state" -o Dir::State::status="$arm/status" -o Dir::Cache="$arm/cache"
        -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o APT::Architectures::="$host"
        -o Acquire::Languages=none -o APT::Sandbox::User= -o APT::Install-Recommends=false)
    bash ci/quiet.sh "$arm/log" "${apt[@]}" update || unavailable "apt has no lists"
    bash ci/quiet.sh "$arm/log" "${apt[@]}" install --yes --download-only python3-minimal libpython3-stdlib \
        "qemu-user-static:$host" || unavailable "apt does not have Python for Arm, or the emulator"
    for package in "$arm"/cache/archives/*.deb; do dpkg-deb -x "$package" "$root"; done
    find "$root/usr/bin" -name 'qemu-*' ! -name qemu-aarch64-static -delete
    rm -rf "$arm/state" "$arm/cache"
    # What Python starts anew is started by its own name, so that has to go through the emulator, too.
    printf '#!/bin/sh\nexec %q -L %q -0 "$0" %q "$@"\n' \
        "$root/usr/bin/qemu-aarch64-static" "$root" "$root/usr/bin/python3" >"$root/usr/bin/python-arm"
    chmod +x "$root/usr/bin/python-arm"
    touch "$arm/complete"
fi

python=$root/usr/bin/python-arm
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
bash ci/quiet.sh "$work/log" "$bin/uv" pip install --target "$work/site" --python-version "$version" \
    --python-platform aarch64-manylinux_2_28 --only-binary :all: "$wheel"
(cd / && PYTHONPATH=$work/site timeout 300 "$python" -m trtllm_pp_progress doctor --json --no-measure >"$work/report") || true
"$bin/python" - "$work/report" <<'PY'
import json
import sys

package = json.load(open(sys.argv[1]))["package"]
print(f"on Arm, Python {package['python']}: native part built: {package['native']}")
sys.exit(package["native"] is not True)
PY

"$bin/python" -m ziglang cc -target aarch64-linux-gnu.2.28 -std=c11 -O2 -pthread -o "$work/stress" tests/native/stress.c
timeout 300 "$root/usr/bin/qemu-aarch64-static" -L "$root" "$work/stress" 20

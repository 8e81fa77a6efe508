#!/usr/bin/env bash
# Build the native part with warnings as errors, run its stress driver under ThreadSanitizer, and prove with a
# planted race that the sanitizer would have spoken. Usage: ci/tsan.sh [TURNS]
set -euo pipefail
cd "$(dirname "$0")/.."
turns=${1:-200}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
warnings=(-std=c11 -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror)
compile() { "${CC:-gcc}" "${warnings[@]}" -pthread "$@"; }

compile -O2 -shared -fPIC -o "$work/native.so" trtllm_pp_progress/driver/native_thread.c
if nm -D --undefined-only "$work/native.so" | grep -E ' (_?Py|P?MPI_)'; then
    echo "native_thread.c must use neither Python nor MPI by name" >&2
    exit 1
fi
compile -g -O1 -fsanitize=thread -o "$work/stress" tests/native/stress.c
compile -g -O1 -fsanitize=thread -DCONTROL -o "$work/control" tests/native/stress.c

# The sanitizer needs the address space it expects: switch randomisation off where that is allowed.
plain=()
if setarch -R true 2>/dev/null; then plain=(setarch -R); fi
export TSAN_OPTIONS="exitcode=66 halt_on_error=1"
timeout 120 "${plain[@]}" "$work/stress" "$turns"
rc=0
timeout 120 "${plain[@]}" "$work/control" 1 >"$work/control.log" 2>&1 || rc=$?
if [ "$rc" -ne 66 ] || ! grep -q 'data race' "$work/control.log"; then
    echo "the planted race was not reported (rc $rc)" >&2
    cat "$work/control.log" >&2
    exit 1
fi
echo "tsan: clean, and the planted race was reported"

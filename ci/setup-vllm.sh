#!/usr/bin/env bash
# Make .venv/vllm: the pinned vLLM on CPU, for tests/vllm. About 4 minutes and 3.3 GB; nothing to do where it is complete.
# torch 55 s, vLLM without its requirements 30 s, the rest 100 s, other releases' handlers 25 s (measured on 2 cores).
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv/vllm
stamp=$venv/complete
pins="vllm 0.33.0, torch 2.13.0, releases 0.28.0 0.30.0 0.31.0 0.32.0, 2"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$pins" ]; then
    echo "$venv is complete: $pins"
    exit 0
fi
started=$SECONDS
python=${PYTHON:-python3.11}
"$python" -m venv "$venv"
pip() { bash ci/quiet.sh "$venv/pip.log" timeout 1800 "$venv/bin/python" -m pip "$@"; }
# vLLM wants another torch and GPU packages; its handler and model runner import without them.
pip install "torch==2.13.0"
pip install --no-deps "vllm==0.33.0"
pip install "torch==2.13.0" numpy wrapt pytest pytest-timeout pytest-xdist hypothesis mypy ruff packaging psutil pyzmq urllib3 regex \
    pydantic cbor2 transformers aiohttp requests openai_harmony openai pillow pybase64 cachetools msgspec cloudpickle \
    uvloop py-cpuinfo prometheus-client xgrammar fastapi partial_json_parser llguidance einops
"$venv/bin/python" -c "import torch, vllm.v1.worker.gpu.model_runner" >/dev/null
for release in 0.28.0 0.30.0 0.31.0 0.32.0; do
    folder=$venv/releases/$release
    [ -f "$folder/pp_utils.py" ] && continue
    wheel=$(mktemp -d)
    pip download --no-deps -d "$wheel" "vllm==$release"
    "$venv/bin/python" - "$wheel" "$folder" <<'PY'
import pathlib, sys, zipfile

(wheel,), folder = list(pathlib.Path(sys.argv[1]).glob("*.whl")), pathlib.Path(sys.argv[2])
folder.mkdir(parents=True, exist_ok=True)
with zipfile.ZipFile(wheel) as archive:
    (folder / "pp_utils.py").write_bytes(archive.read("vllm/v1/worker/gpu/pp_utils.py"))
PY
    rm -rf "$wheel"
done
echo "$pins" >"$stamp"
echo "$venv made in $((SECONDS - started)) s: $pins"

#!/usr/bin/env bash
# The GPU tests and the GPU benchmark in one go, on a machine with one or two GPUs: bench/gpu_session.sh OUT
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: bench/gpu_session.sh OUT}
mkdir -p "$out"
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_LOGGING_LEVEL=ERROR HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
python3 bench/gpu.py --shapes qwen3-8b --out "$out" >"$out/bench.log" 2>&1
python3 -m pytest -q tests/gpu -p no:cacheprovider >"$out/tests.log" 2>&1
grep -E '^\||engine on GPU' "$out/bench.log"
tail -5 "$out/tests.log"

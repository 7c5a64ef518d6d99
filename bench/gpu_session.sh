#!/usr/bin/env bash
# The GPU benchmark and the GPU tests in one go, on a machine with one or two GPUs: bench/gpu_session.sh OUT [SHAPES]
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: bench/gpu_session.sh OUT [SHAPES]}
mkdir -p "$out"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_LOGGING_LEVEL=ERROR HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
timeout 420 python3 -m instep.bench --shapes "${2:-qwen3-8b}" --out "$out" >"$out/bench.log" 2>&1
timeout 420 python3 -m pytest -q tests/gpu -p no:cacheprovider >"$out/tests.log" 2>&1
sed -n '/medians of/,$p' "$out/bench.log"
tail -5 "$out/tests.log"

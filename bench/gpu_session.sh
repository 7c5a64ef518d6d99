#!/usr/bin/env bash
# The GPU tests and the GPU benchmark in one go, on a machine with one or two GPUs: bench/gpu_session.sh OUT [SHAPES]
# Without vLLM (a minute): bench/gpu_session.sh OUT transports
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: bench/gpu_session.sh OUT [SHAPES]}
mkdir -p "$out"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_LOGGING_LEVEL=ERROR HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
tests() { timeout "$1" python3 -m pytest -q -s -p no:cacheprovider -o faulthandler_timeout=90 "${@:3}" >"$out/$2.log" 2>&1; tail -3 "$out/$2.log"; }
tests 120 transports tests/gpu/test_nccl.py tests/gpu/test_digest_cuda.py
[ "${2:-}" = transports ] && exit
timeout 420 python3 -m instep.bench --shapes "${2:-qwen3-8b}" --out "$out" >"$out/bench.log" 2>&1
sed -n '/medians of/,$p' "$out/bench.log"
tests 420 vllm tests/gpu --ignore tests/gpu/test_nccl.py --ignore tests/gpu/test_digest_cuda.py

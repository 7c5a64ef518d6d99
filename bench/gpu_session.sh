#!/usr/bin/env bash
# The GPU tests and the GPU benchmarks, on a machine with one or two GPUs: bench/gpu_session.sh OUT [STEP ...]
# Steps, in the order given; all of them without one. Times are those of two H200 with 32 cores.
#   transports  the tests that need no vLLM: 80 s
#   vllm        those that do, several engines at once: 250 s
#   bench       every way beside vLLM's own, SHAPES=qwen3-8b: 260 s
#   fsdp2       the same from two ranks under FSDP2
#   first       the first pushes over NCCL
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: bench/gpu_session.sh OUT [transports] [vllm] [bench] [fsdp2] [first]}
shift
mkdir -p "$out"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_LOGGING_LEVEL=ERROR HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
shapes=${SHAPES:-qwen3-8b}
no_vllm=(tests/gpu/test_nccl.py tests/gpu/test_digest_cuda.py tests/gpu/test_bench_copies.py)

tests() { timeout "$1" python3 -m pytest -q -s -p no:cacheprovider -o faulthandler_timeout=120 "${@:3}" >"$out/$2.log" 2>&1; echo "$2: $(tail -1 "$out/$2.log")"; }
bench() { timeout "$1" python3 -m instep.bench --shapes "$shapes" --out "$out" "${@:3}" >"$out/$2.log" 2>&1; sed -n '/medians of/,$p' "$out/$2.log"; }

[ $# -gt 0 ] || set -- transports vllm bench fsdp2 first
for step; do
    case $step in
    transports) tests 200 transports "${no_vllm[@]}" ;;
    vllm) # what looks at free memory runs alone, afterwards
        for file in tests/gpu/test_*.py; do
            [[ " ${no_vllm[*]} " == *" $file "* ]] || tests 400 "$(basename "$file" .py)" "$file" -k "not flat" &
        done
        wait
        tests 300 flat tests/gpu -k flat ;;
    bench) bench 420 bench ;;
    fsdp2) bench 420 fsdp2 --trainer fsdp2 ;;
    first) timeout 200 python3 tests/gpu/first_push.py "$shapes" >"$out/first.json" 2>"$out/first.log" && cat "$out/first.json" ;;
    *) echo "no step named $step" >&2; exit 2 ;;
    esac
done

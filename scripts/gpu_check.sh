#!/usr/bin/env bash
# Everything that needs a GPU, in one command of under ten minutes: the tests marked gpu, a sanitizer subset that
# touches every kernel, and the benchmark. Usage: scripts/gpu_check.sh [folder for logs and results]
set -u
cd "$(dirname "$0")/.."
out=${1:-gpu_check}
mkdir -p "$out"
export PYTHONPATH=. PYTHONUNBUFFERED=1
status=0

echo "== tests"
timeout 330 python3 -m pytest -m gpu -q -n "${QMOE_EP_GPU_JOBS:-14}" -p no:cacheprovider tests >"$out/tests.log" 2>&1 || status=1
tail -n 8 "$out/tests.log"

echo "== sanitizer"
subset="tests/test_kernels_portable_gpu.py tests/test_cuda_gpu.py"
select="bit_pattern or stored_cases"
for tool in memcheck racecheck initcheck; do
  timeout 100 compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20 \
    python3 -m pytest -m gpu -q -p no:cacheprovider -p no:xdist $subset -k "$select" >"$out/$tool.log" 2>&1 || status=1
  grep -E "ERROR SUMMARY|RACECHECK SUMMARY|passed|failed" "$out/$tool.log" | tail -n 3 | sed "s/^/$tool: /"
done

echo "== benchmark"
timeout 200 python3 -m benchmarks.layer -o "$out/layer.json" 2>&1 | tee "$out/layer.log" || status=1
exit $status

#!/usr/bin/env bash
# Everything that needs a GPU, in one command of under ten minutes: the tests marked gpu, a sanitizer subset that
# touches every kernel, and the benchmark. Usage: scripts/gpu_check.sh [folder for logs and results]. Where the folder is no git
# checkout, QMOE_EP_COMMIT says what goes into the record.
set -u
pids=()
cd "$(dirname "$0")/.."
out=${1:-gpu_check}
mkdir -p "$out"
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
status=0

echo "== tests"
timeout 320 python3 -m pytest -m gpu -q -n "${QMOE_EP_GPU_JOBS:-14}" -p no:cacheprovider -p no:benchmark tests \
  >"$out/tests.log" 2>&1 || status=1
tail -n 8 "$out/tests.log"

echo "== sanitizer"
sanitize() {
  timeout 110 compute-sanitizer --tool "$1" --error-exitcode 9 --print-limit 20 \
    python3 -m pytest -m gpu -q -p no:cacheprovider -p no:benchmark -p no:xdist \
    tests/test_cuda_gpu.py -k "sanitizer" >"$out/$1.log" 2>&1
}
for tool in memcheck racecheck initcheck; do
  sanitize "$tool" &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || status=1; done
for tool in memcheck racecheck initcheck; do
  grep -E "ERROR SUMMARY|RACECHECK SUMMARY|passed|failed" "$out/$tool.log" | tail -n 2 | sed "s/^/$tool: /"
done

echo "== benchmark"
timeout 150 python3 -m qmoe_ep bench -o "$out/layer.json" ${QMOE_EP_COMMIT:+--commit "$QMOE_EP_COMMIT"} 2>&1 | tee "$out/layer.log" || status=1
exit $status

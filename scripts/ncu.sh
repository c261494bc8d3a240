#!/usr/bin/env bash
# What the hardware's counters say of each GEMV kernel alone: DRAM throughput and achieved occupancy,
# as Markdown tables over n. Needs a GPU whose counters this user may read, and Nsight Compute.
#   scripts/ncu.sh [--kernel naive,half2_stream] [--n 1024,2048] [--dtype fp32,fp16]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

if ! command -v ncu > /dev/null; then
  echo "ncu (Nsight Compute) is not on PATH; it comes with the CUDA toolkit" >&2
  exit 5
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

metrics=dram__throughput.avg.pct_of_peak_sustained_elapsed
metrics+=,sm__warps_active.avg.pct_of_peak_sustained_active
metrics+=,gpu__time_duration.sum
# The clocks stay as they are; each launch finds the caches flushed, which is ncu's default.
code=0
ncu --clock-control none --profile-from-start off --metrics "$metrics" \
  --csv --page raw --print-units base --log-file "$work/ncu.csv" \
  "$python" "$root/scripts/ncu_driver.py" run "$work/order.json" "$@" || code=$?
if [ "$code" -ne 0 ]; then
  grep -h '^==\(ERROR\|WARNING\)==' "$work/ncu.csv" >&2 || true
  exit "$code"
fi
"$python" "$root/scripts/ncu_driver.py" table "$work/order.json" "$work/ncu.csv"

#!/usr/bin/env bash
# Everything that needs a GPU: GPU tests, compute-sanitizer, a short benchmark. Writes
# tests/gpu_receipt.json, and copies it with the logs to $OUT where that is set.
#   scripts/gpu_suite.sh [tests] [sanitizer] [bench]      (default: all, or those named in $SUITE)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" "$root/scripts/gpu_suite.py" "$@"

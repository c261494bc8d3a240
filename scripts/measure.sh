#!/usr/bin/env bash
# Every figure that the project quotes, measured in one go on a GPU machine:
#   scripts/measure.sh [example] [bench] [long] [sampling] [families] [gemv] [layers] [report] [ab]
#                      [slow] [aa] [peers] [ncu]     (default: all, in this order; see measure.py)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
cd "$root"
exec "$python" scripts/measure.py "$@"

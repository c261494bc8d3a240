#!/usr/bin/env bash
# What the project quotes of a GPU, measured in one go:
#   scripts/measure.sh [example] [bench] [long] [prompts] [loop] [sampling] [families] [gemv]
#                      [layers] [report] [ab] [slow] [aa] [peers] [ncu]
#                      (default: all, in this order; see measure.py)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
cd "$root"
exec "$python" scripts/measure.py "$@"

#!/usr/bin/env bash
# Generates text with the example model, from nothing but python3: makes .venv and fetches the
# model on the first run.
#   scripts/run.sh "PROMPT" [options of minidecode generate]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

if [ $# -eq 0 ]; then
  echo 'usage: scripts/run.sh "PROMPT" [options of minidecode generate]' >&2
  exit 2
fi
make_venv example
exec "$root/.venv/bin/minidecode" generate --prompt="$1" "${@:2}"

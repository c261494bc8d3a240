#!/usr/bin/env bash
# Everything that CI checks and a machine without a GPU can: lint, types, format, tests.
#   scripts/test.sh [arguments of pytest]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
cd "$root"

make_venv dev
PATH="$root/.venv/bin:$PATH"

if ! command -v chromium > /dev/null || ! command -v chromedriver > /dev/null; then
  if [ "$(id -u)" -eq 0 ] && command -v apt-get > /dev/null; then
    echo "Installing chromium for the browser tests …"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y \
      --no-install-recommends chromium chromium-driver; } > /dev/null ||
      echo "chromium could not be installed: the browser tests will be skipped, or fail in CI"
  else
    echo "no chromium and chromedriver here: the browser tests will be skipped"
  fi
fi

echo "ruff"
ruff check .
ruff format --check .
echo "mypy"
mypy
echo "clang-format"
find cuda -type f \( -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.h' \) \
  -exec clang-format --dry-run -Werror {} +
echo "pytest"
pytest -n logical --maxprocesses 8 --dist worksteal "$@"

# Sourced by the other scripts: sets `root` and defines make_venv.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# make_venv EXTRA: $root/.venv with this checkout and its extra; at once if nothing changed.
make_venv() {
  local venv="$root/.venv" stamp
  stamp="$venv/.$1-$(cksum < "$root/pyproject.toml" | tr ' ' -)"
  if [ -e "$stamp" ]; then return; fi
  echo "Setting up $venv for $1 …" >&2
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "minidecode needs Python 3.10 or newer, and python3 is $(python3 --version 2>&1)" >&2
    return 5
  }
  [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
  # First and by version: left to itself, pip would take the newest.
  "$venv/bin/python" -m pip install -qq torch==2.13.0 >&2
  "$venv/bin/python" -m pip install -qq --editable "$root[$1]" >&2
  rm -f "$venv/.$1-"*
  touch "$stamp"
}

#!/usr/bin/env bash
# Installs on first use, then runs one command of tools/commands.py (python -m tools COMMAND works without this).
set -euo pipefail
clone="$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" # also when started through a link
venv="$clone/.venv"

install() {
  if [ -n "${LION_NO_INSTALL:-}" ]; then return; fi
  local python="${PYTHON:-python3}" stamp
  stamp="$("$python" -c 'import hashlib, sys; print(sys.version, hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' "$clone/setup.py")"
  if [ "$(cat "$venv/stamp" 2>/dev/null)" = "$stamp" ]; then return; fi
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or newer is needed, PYTHON=... names one" >&2; exit 2; }
  echo "installing into $venv (first use: about 5 GB, minutes without a further line) ..." >&2
  "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check -e "$clone[all]" # of most modules no bytecode is needed
  printf '%s\n' "$stamp" >"$venv/stamp" # last: an interrupted install is repaired, a finished one never repeated
}

found="$clone${PYTHONPATH:+:$PYTHONPATH}" # Python finds the clone from any folder, and no module of the current folder
case "${1:-}" in -h | --help | help) PYTHONPATH="$found" PYTHONSAFEPATH=1 exec "${PYTHON:-python3}" -m tools --help ;; esac
install
if [ -z "${LION_NO_INSTALL:-}" ]; then export PATH="$venv/bin:$PATH"; fi
PYTHONPATH="$found" PYTHONSAFEPATH=1 exec python -m lion "$@"

#!/usr/bin/env bash
# Installs on first use, then runs one command. All logic is in tools/ (python -m tools COMMAND works without this).
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" # also when started through a link

usage() {
  cat <<'TEXT'
usage: ./run.sh                               train and evaluate recipes/quickstart.yaml
       ./run.sh RECIPE [key=value ...]        train a recipe, then evaluate it in every form
       ./run.sh eval RUN [--form full|chunk|rnn|all] [--chunk-size N]
       ./run.sh list                          the recipes and what they claim
       ./run.sh show RECIPE [key=value ...]   a recipe in full, its steps, parameters, memory
       ./run.sh predict RUN FILE ...          classify pictures
       ./run.sh bench ops                     time the operators against SDPA
       ./run.sh bench train RECIPE ...        time whole training steps against softmax
       ./run.sh bench inference RUN           latency and memory by form and image size
       ./run.sh convert FILE RECIPE OUT       a run of the authors', DeiT's or timm's checkpoint
       ./run.sh report RUN ...                runs as one table, with curves
       ./run.sh consolidate RUN               one file of a sharded checkpoint
       ./run.sh soak [--kills N] [key=value ...]  kill a run again and again; nothing may be lost
       ./run.sh logs                          TensorBoard over runs/
       ./run.sh test [pytest options]         the test suite
options: --fresh (train: set an earlier run of this name aside), --no-eval (train only), --processes N,
         --debug (show tracebacks)
Paths are relative to this folder. Several visible GPUs are used through torchrun.
environment: LION_DATA (data root), PYTHON (interpreter for .venv), CUDA_VISIBLE_DEVICES,
             LION_NO_INSTALL=1 (use the python on PATH as it is)
TEXT
}

install() {
  if [ -n "${LION_NO_INSTALL:-}" ]; then return; fi
  local python="${PYTHON:-python3}" stamp
  stamp="$("$python" -c 'import hashlib, sys; print(sys.version, hashlib.sha256(open("setup.py", "rb").read()).hexdigest())')"
  if [ "$(cat .venv/stamp 2>/dev/null)" = "$stamp" ]; then return; fi
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or newer is needed, PYTHON=... names one" >&2; exit 2; }
  echo "installing into .venv (first use; PyTorch is large) ..." >&2
  "$python" -m venv .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[all]'
  printf '%s\n' "$stamp" >.venv/stamp # last: an interrupted install is repaired, a finished one never repeated
}

# Threads that wait for each other spin briefly, then sleep: left to spin, sharing the cores with one other process
# slows small models down fifty times over.
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-1000}"
# Steps of one shape free and take the same buffers: keep them instead of asking the kernel for new pages.
export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-1073741824}" MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-4294967296}"

case "${1:-}" in -h | --help | help) usage; exit 0 ;; esac
install
if [ -z "${LION_NO_INSTALL:-}" ]; then export PATH="$PWD/.venv/bin:$PATH"; fi

case "${1:-}" in
  "") exec python -m tools train recipes/quickstart.yaml ;;
  eval | list | show | predict | bench | consolidate | convert | report | soak) exec python -m tools "$@" ;;
  logs) shift; exec tensorboard --logdir runs "$@" ;;
  test) shift; exec python -m pytest "$@" ;;
  -* | *=*) exec python -m tools train recipes/quickstart.yaml "$@" ;;
  *.yaml | *.yml | */*) exec python -m tools train "$@" ;;
  *) exec python -m tools "$@" ;;
esac

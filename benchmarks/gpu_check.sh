#!/usr/bin/env bash
# Everything that a machine with a GPU can tell of this repository. See --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The Python that is active (or PYTHON=...) where it has torch, else that of .venv: nothing is installed.
python="${PYTHON:-python3}"
if ! "$python" -c 'import torch, numpy' >/dev/null 2>&1; then
    python=".venv/bin/python"
fi
if ! "$python" -c 'import torch, numpy' >/dev/null 2>&1; then
    echo "error: no Python with torch and numpy is found; name one with PYTHON=..." >&2
    exit 2
fi
exec "$python" benchmarks/gpu_check.py "$@"

#!/usr/bin/env bash
# Checks and measures this repository on a machine with a GPU. See --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Uses the active Python (or PYTHON=...) if it has torch, else that of .venv. Installs nothing.
python="${PYTHON:-python3}"
if ! "$python" -c 'import torch, numpy' >/dev/null 2>&1; then
    python=".venv/bin/python"
fi
if ! "$python" -c 'import torch, numpy' >/dev/null 2>&1; then
    echo "error: no Python with torch and numpy is found; name one with PYTHON=..." >&2
    exit 2
fi
exec "$python" benchmarks/gpu_check.py "$@"

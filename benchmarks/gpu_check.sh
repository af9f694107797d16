#!/usr/bin/env bash
# Checks and measures this repository on a machine with a GPU. See --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Uses the active Python (or PYTHON=...) if it has torch, else that of .venv. Installs nothing.
has_torch() {
    "$1" -c 'import sys; from importlib.util import find_spec; sys.exit(not (find_spec("torch") and find_spec("numpy")))' 2>/dev/null
}
python="${PYTHON:-python3}"
has_torch "$python" || python=".venv/bin/python"
if ! has_torch "$python"; then
    echo "error: no Python with torch and numpy is found; name one with PYTHON=..." >&2
    exit 2
fi
exec "$python" -m benchmarks.gpu_check "$@"

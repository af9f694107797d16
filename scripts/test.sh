#!/usr/bin/env bash
# Lint, types, import floors and tests. See --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
    cat <<'TEXT'
bash scripts/test.sh [--no-venv] [--long] [arguments of pytest]

  --no-venv   use the active environment instead of .venv
  --long      run the tests marked long as well

Everything else goes to pytest, for example: bash scripts/test.sh tests/zero -k layout
TEXT
}

use_venv=yes
pytest_arguments=()
for argument in "$@"; do
    case "$argument" in
        --no-venv) use_venv=no ;;
        --long) pytest_arguments+=(-m "") ;;
        -h | --help) usage && exit ;;
        *) pytest_arguments+=("$argument") ;;
    esac
done

prepare_environment "$use_venv" requirements.txt requirements-dev.txt

# The tests start several ranks at a time; with a thread pool each they would only stand in each other's way.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

echo "== ruff: style"
python -m ruff check .
python -m ruff format --check --quiet .
echo "== mypy: types"
python -m mypy
echo "== import-linter: floors of the house"
lint-imports --no-logo
echo "== kernels"
bash scripts/build_extensions.sh --no-venv
echo "== pytest: statements"
python -m pytest ${pytest_arguments[@]+"${pytest_arguments[@]}"}

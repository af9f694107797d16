#!/usr/bin/env bash
# Runs lint, type checks, the contract of imports, and tests. See --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
    cat <<'TEXT'
bash scripts/test.sh [--no-venv] [--long] [--tier NAME] [arguments of pytest]

  --no-venv     use the active environment instead of .venv
  --long        run the tests marked long as well, and look for new examples in property tests
  --tier NAME   only tests that start no ranks (pure), ranks as threads (virtual), or ranks as processes (gloo)

Everything else goes to pytest, for example: bash scripts/test.sh tests/zero -k layout
Without arguments of pytest, tests run on three workers: with two cores one of them is usually waiting for processes.
TEXT
}

use_venv=yes
tier="" length="not long"
own_arguments=() pytest_arguments=()
while (($#)); do
    case "$1" in
        --no-venv) use_venv=no ;;
        --long) length="(long or not long)" && own_arguments+=(--hypothesis-profile long) ;;
        --tier)
            [[ "${2:-}" =~ ^(pure|virtual|gloo)$ ]] || stop "--tier ${2:-} is not a tier; choose pure, virtual or gloo."
            tier="$2" && shift
            ;;
        -h | --help) usage && exit ;;
        *) pytest_arguments+=("$1") ;;
    esac
    shift
done
own_arguments+=(-m "${tier:+$tier and }$length")
if ((${#pytest_arguments[@]} == 0)); then
    own_arguments+=(-n 3 --dist loadgroup --no-loadscope-reorder)
fi

prepare_environment "$use_venv" requirements.txt requirements-dev.txt

# The tests start several ranks at a time; with a thread pool each, they would slow each other down.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

echo "== ruff: style"
python -m ruff check .
python -m ruff format --check --quiet .
echo "== shellcheck: scripts"
shellcheck --external-sources --source-path SCRIPTDIR:. scripts/*.sh scripts/*.sbatch benchmarks/*.sh .ci/run
echo "== import-linter: floors of the house"
lint-imports --no-logo
echo "== mypy: types, and meanwhile kernels"
python -m mypy &
types=$!
# A background job outlives a script that fails or is interrupted.
trap 'kill "$types" 2>/dev/null || true' EXIT
bash scripts/build_extensions.sh --no-venv
wait "$types"
trap - EXIT
echo "== pytest: statements"
python -m pytest "${own_arguments[@]}" ${pytest_arguments[@]+"${pytest_arguments[@]}"}

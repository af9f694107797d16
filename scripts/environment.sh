# Sourced by the scripts beside it: changes to the repository root, and defines functions that provide a Python with the packages of the
# requirement files.
# shellcheck shell=bash

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
readonly ROOT
cd "$ROOT" || exit
source scripts/checks.sh

# prepare_environment yes|no REQUIREMENT_FILE...
# yes: makes or reuses .venv. no: stays in the active environment, and installs only if a package of the files is missing.
prepare_environment() {
    local use_venv="$1"
    shift
    if [[ "$use_venv" == yes ]]; then
        make_venv
        install_if_changed "$@"
    else
        use_active_python
        has_requirements "$@" || install "$@"
    fi
}

# Where only python3 is on PATH, `python` is a function, so `exec python` does not work.
use_active_python() {
    command -v python >/dev/null || python() { python3 "$@"; }
    require_python python
}

make_venv() {
    if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        local base
        base="$(find_python)"
        require_python "$base"
        echo "Making .venv with $("$base" --version)"
        "$base" -m venv .venv || stop "$base cannot make a virtual environment; install its venv module, or give --no-venv."
    fi
    require_python "$ROOT/.venv/bin/python"
    export VIRTUAL_ENV="$ROOT/.venv" PATH="$ROOT/.venv/bin:$PATH"
}

# Prints the path of the first Python that is new enough; if there is none, that of any Python.
find_python() {
    local name
    for name in "${PYTHON:-python3}" python3.{14,13,12,11,10} python; do
        if is_new_enough "$name"; then
            command -v "$name"
            return
        fi
    done
    command -v "${PYTHON:-python3}" || true
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

require_python() {
    [[ -n "$1" ]] || stop "no Python was found; install Python 3.10 or newer."
    is_new_enough "$1" || stop "$1 is $("$1" --version 2>&1), but Python 3.10 or newer is needed; install one, or name one with PYTHON=..."
}

# The stamp holds a checksum of the requirement files, so that pip runs again only if they have changed.
install_if_changed() {
    local stamp current
    stamp=".venv/requirements-$(printf '%s\n' "$@" | checksum).stamp"
    current="$(cat constraints.txt "$@" | checksum)"
    if [[ "$(cat "$stamp" 2>/dev/null)" != "$current" ]]; then
        install "$@"
        echo "$current" >"$stamp"
    fi
}

install() {
    local file arguments=()
    for file in "$@"; do
        arguments+=(--requirement "$file")
    done
    echo "Installing $* (the first time takes a few minutes)"
    python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "${arguments[@]}" ||
        stop "pip could not install $*; see its messages above."
}

has_requirements() {
    python - "$@" <<'PYTHON'
import sys
from importlib.metadata import PackageNotFoundError, version

try:
    from packaging.requirements import Requirement
except ImportError:
    sys.exit(1)
lines = [line.strip() for path in sys.argv[1:] for line in open(path, encoding="utf-8")]
for requirement in [Requirement(line) for line in lines if line and not line.startswith("#")]:
    try:
        if not requirement.specifier.contains(version(requirement.name), prereleases=True):
            sys.exit(1)
    except PackageNotFoundError:
        sys.exit(1)
PYTHON
}

checksum() {
    cksum | cut -d ' ' -f 1
}

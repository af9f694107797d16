#!/usr/bin/env bash
# Builds the documents as a site. See --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
    cat <<'TEXT'
bash scripts/docs.sh [--no-venv] [--serve]

  --no-venv   use the active environment instead of .venv
  --serve     then serve the site at http://localhost:8000 (another port: PORT=8080), until Ctrl-C

Writes the pages of docs/api from docstrings, and the site into site/; open site/index.html in a browser. A link, an anchor
or a page that does not exist is an error. The site needs no network, neither to be built nor to be read.
TEXT
}

use_venv=yes
serves=no
for argument in "$@"; do
    case "$argument" in
        --no-venv) use_venv=no ;;
        --serve) serves=yes ;;
        -h | --help) usage && exit ;;
        *) usage >&2 && stop "$argument is not an argument of this script." ;;
    esac
done

PORT="${PORT:-8000}"
require_number PORT 1 65535
prepare_environment "$use_venv" requirements-docs.txt
python -m docs.api_pages
rm -rf site
python -m sphinx -q -E -W --keep-going --nitpicky -c docs/website -d build/docs -b html . site
rm -f site/.buildinfo
echo "The site is in site/: open site/index.html."
if [[ "$serves" == yes ]]; then
    python -m http.server --bind localhost --directory site "$PORT" || stop "PORT=$PORT cannot be served; choose another port."
fi

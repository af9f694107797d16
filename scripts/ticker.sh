# Sourced by the scripts beside it: defines `ticking`, which shows how long a command has been running.
# shellcheck shell=bash

readonly TICKER_COLUMNS=75 UNKNOWN_COLUMNS=80

# ticking COMMAND...: runs the command, and shows every few seconds how long that has been going on: on a terminal in one place, else as
# lines, and not as many.
ticking() {
    local ticker status=0
    tick "$SECONDS" &
    ticker=$!
    "$@" || status=$?
    kill "$ticker" 2>/dev/null || true
    wait "$ticker" 2>/dev/null || true
    if has_cursor; then printf '\033[K' >&2; fi
    return "$status"
}

# tick START: ends with this script, also where that is interrupted.
tick() {
    local every=5
    if has_cursor; then every=1; fi
    while sleep "$every" >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
        show_tick "$((SECONDS - $1))"
    done
}

# show_tick SECONDS: on a terminal at the right, so that lines of the command do not run into it, and without its last column, after which
# it would wrap.
show_tick() {
    if has_cursor; then
        local columns
        columns="$(terminal_columns)"
        printf '%*s\r' "$((columns > TICKER_COLUMNS ? TICKER_COLUMNS : columns - 1))" "... $1 s" >&2
    else
        printf '  ... %s s\n' "$1" >&2
    fi
}

# Whether standard error is a terminal that understands control sequences.
has_cursor() {
    [[ -t 2 && "${TERM:-dumb}" != dumb ]]
}

# Prints the width of the terminal on standard error.
terminal_columns() {
    local size columns
    size="$(stty size <&2 2>/dev/null)" || size=""
    columns="${size##* }"
    echo "$((columns > 0 ? columns : UNKNOWN_COLUMNS))"
}

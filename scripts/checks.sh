# Sourced by the scripts beside it: checks values from the command line and the environment. A wrong value ends the script with code 2.
# shellcheck shell=bash

stop() {
    echo "error: $*" >&2
    exit 2
}

# require_set NAME MEANING: the variable NAME is not empty.
require_set() {
    [[ -n "${!1:-}" ]] || stop "$1 is not set; set it to $2."
}

# is_number VALUE SMALLEST LARGEST. Check a value before any arithmetic with it, because bash runs commands that an arithmetic value names.
is_number() {
    [[ "$1" =~ ^[0-9]{1,15}$ ]] && ((10#$1 >= $2 && 10#$1 <= $3))
}

# require_number NAME SMALLEST LARGEST: the variable NAME is a whole number in this range.
require_number() {
    is_number "${!1:-}" "$2" "$3" || stop "$1=${!1:-} is not a whole number from $2 to $3; correct it."
    printf -v "$1" '%d' "$((10#${!1}))"
}

# refuse_dash MEANING VALUE: the value does not begin with a dash, which programs would take for a flag.
refuse_dash() {
    [[ "$2" != -* ]] || stop "$1 $2 begins with a dash, so programs would take it for a flag; write ./$2, or put flags last."
}

# Prints the number of GPUs of this machine.
gpus() { nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true; }

# require_host NAME: this machine can resolve the host that the variable NAME holds. torchrun would try for many minutes without naming it.
require_host() {
    refuse_dash "$1" "${!1}"
    ! command -v getent >/dev/null || getent ahosts "${!1}" >/dev/null ||
        stop "$1=${!1} cannot be resolved on $HOSTNAME; set it to a name or an address at which every node reaches node 0."
}

# require_free_port NAME: no program of this machine listens at the port that the variable NAME holds. torchrun would end in a traceback.
require_free_port() {
    ! (: <>"/dev/tcp/127.0.0.1/${!1}") 2>/dev/null ||
        stop "$1=${!1} is the port of another program on $HOSTNAME; set it to a free one, the same on every node."
}

# Prints the iteration of the last checkpoint in a folder; 0 if nothing is saved, and for a converted model, whose file says `release`.
saved_iteration() {
    local saved
    saved="$(head -c 20 -- "$1/latest_checkpointed_iteration.txt" 2>/dev/null || true)"
    if [[ "$saved" =~ ^[0-9]{1,15}$ ]]; then
        echo "$((10#$saved))"
    else
        echo 0
    fi
}

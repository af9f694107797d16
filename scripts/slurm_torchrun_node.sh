#!/usr/bin/env bash
# One node of scripts/slurm_torchrun.sbatch, which lets srun start this on every node: runs torchrun with these arguments.
#
# Ends with torchrun's exit code, but with 0 if Slurm has sent SIGTERM, because after a signal torchrun's code is 1 even if every rank has
# saved and left. Whether the job goes back into the queue then depends on what has been saved.
set -euo pipefail
source scripts/checks.sh
require_host MASTER_ADDR

# Sends torchrun SIGTERM when the slurmstepd that started this script has died: nothing else would end torchrun and its ranks.
end_without_slurmstepd() {
    trap '' TERM
    while [[ "$(parent_of "$$")" == "$PPID" ]]; do
        sleep 1
    done
    kill -s TERM "$1"
}

# Prints the parent of a process; nothing if the process has ended.
parent_of() {
    local key value
    while read -r key value; do
        if [[ "$key" == PPid: ]]; then echo "$value"; fi
    done 2>/dev/null <"/proc/$1/status" || true
}

# Slurm signals every process of the step, so torchrun has the signal, too. A second one would make it leave its ranks.
is_asked_to_leave=no
trap 'is_asked_to_leave=yes' TERM
torchrun --node_rank "$SLURM_NODEID" "$@" &
torchrun=$!
end_without_slurmstepd "$torchrun" >/dev/null 2>&1 &
watch=$!
disown "$watch" # bash would print that it was killed

code=0
wait "$torchrun" || code=$?
while kill -0 "$torchrun" 2>/dev/null; do # a signal has interrupted `wait`
    code=0
    wait "$torchrun" || code=$?
done
kill -s KILL "$watch" 2>/dev/null || true
if [[ "$is_asked_to_leave" == yes ]]; then
    exit 0
fi
exit "$code"

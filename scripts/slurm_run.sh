# Sourced by the Slurm scripts beside it: the common part of both. Slurm runs a copy of a script, so the repository is the folder from
# which the job was submitted.

cd "${SLURM_SUBMIT_DIR:?submit this with sbatch, from the root of the repository}"
source scripts/cluster_environment.sh

: "${SAVE:?set it to the folder of checkpoints, of a file system that all nodes share}"
: "${TRAIN_ITERS:?set it to the length of the run, in iterations}"

# MODEL names a file of scripts/models; without it, the arguments must have the shape of the model.
MODEL_ARGS=()
if [[ -n "${MODEL:-}" ]]; then
    source "scripts/models/$MODEL.sh"
fi

# SAVE and TRAIN_ITERS decide whether a job goes back into the queue, so the run must not use another folder or length.
for word in "$@"; do
    case "${word%%=*}" in
        --save | --load) remedy="set SAVE, the folder of checkpoints, instead" ;;
        --train-iters | --train-samples | --train-tokens) remedy="set TRAIN_ITERS, the length of the run in iterations, instead" ;;
        *) continue ;;
    esac
    echo "error: ${word%%=*} cannot be used with this script, which repeats the job until TRAIN_ITERS are saved in SAVE; $remedy." >&2
    exit 2
done

# The same command starts and resumes the run. Later flags win over earlier ones, so the arguments can override these.
RUN_ARGS=(
    ${MODEL_ARGS[@]+"${MODEL_ARGS[@]}"}
    --train-iters "$TRAIN_ITERS"
    --save "$SAVE"
    --load "$SAVE"
    --save-interval 1000
    --keep-last 3
    --exit-signal-handler
    "$@"
)

# Prints 0 if nothing is saved, and for a converted model, for which the file says `release`.
saved_iteration() {
    local saved
    saved="$(cat "$SAVE/latest_checkpointed_iteration.txt" 2>/dev/null || true)"
    if [[ "$saved" =~ ^[0-9]+$ ]]; then
        echo "$((10#$saved))"
    else
        echo 0
    fi
}

# Puts this job back into the queue if it has saved a later iteration, but not the last one. A job that saved nothing new is not repeated.
requeue_until_done() {
    local before="$1" now
    now="$(saved_iteration)"
    if ((now >= TRAIN_ITERS)); then
        echo "done: iteration $now is saved in $SAVE"
    elif ((now > before)); then
        echo "iteration $now of $TRAIN_ITERS is saved in $SAVE; job $SLURM_JOB_ID goes back into the queue"
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "error: nothing was saved beyond iteration $before; the job is not repeated." >&2
        exit 1
    fi
}

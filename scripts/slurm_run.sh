# Sourced by the Slurm scripts beside it: the common part of both. Slurm runs a copy of a script, so the repository is the folder from
# which the job was submitted.
# shellcheck shell=bash

cd "${SLURM_SUBMIT_DIR:?submit this with sbatch, from the root of the repository}" || exit
source scripts/checks.sh
source scripts/cluster_environment.sh

# value_of FLAG WORDS: prints the value of a flag among words, the last if it is repeated; nothing if it is not there.
value_of() {
    local flag="$1" found=""
    shift
    while (($#)); do
        case "$1" in
            "$flag") found="${2:-}" ;;
            "$flag="*) found="${1#*=}" ;;
        esac
        shift
    done
    printf '%s' "$found"
}

# The job is repeated until iteration TRAIN_ITERS is saved in SAVE, from which each repetition resumes. Flags say both, or variables.
TRAIN_ITERS="${TRAIN_ITERS:-$(value_of --train-iters "$@")}"
SAVE="${SAVE:-$(value_of --save "$@")}"
require_set SAVE "the folder of checkpoints, on a file system that all nodes share, or give --save"
refuse_dash SAVE "$SAVE"
require_set TRAIN_ITERS "the length of the run, in iterations, or give --train-iters"
require_number TRAIN_ITERS 1 999999999999
for flag in --save --load; do
    value="$(value_of "$flag" "$@")"
    [[ -z "$value" || "$value" == "$SAVE" ]] ||
        stop "$flag $value is not SAVE=$SAVE; the job resumes from the folder into which it saves, so name the same one."
done
value="$(value_of --train-iters "$@")"
[[ -z "$value" || "$value" == "$TRAIN_ITERS" ]] ||
    stop "--train-iters $value is not TRAIN_ITERS=$TRAIN_ITERS, which ends the job; give the same number, or one of the two."
for word in "$@"; do
    case "${word%%=*}" in
        --train-samples | --train-tokens)
            stop "${word%%=*} cannot be used with this script, which counts iterations; give --train-iters instead."
            ;;
        --finetune)
            stop "--finetune would begin at iteration 0 each time this job is repeated; name the weights with --pretrained-checkpoint" \
                "instead."
            ;;
        --ckpt-step)
            stop "--ckpt-step would go back to the same iteration each time this job is repeated; write the iteration" \
                "into $SAVE/latest_checkpointed_iteration.txt instead."
            ;;
    esac
done

# A job that was killed in its first save may have left no file that names the latest checkpoint. Its run would start from scratch.
LAST_GOOD=()
if [[ ! -e "$SAVE/latest_checkpointed_iteration.txt" ]]; then
    for folder in "$SAVE"/iter_*; do
        [[ ! "${folder##*/}" =~ ^iter_[0-9]+$ ]] || LAST_GOOD=(--load-last-good-checkpoint)
    done
fi

# MODEL names a file of scripts/models; without it, the arguments must have the shape of the model.
MODEL_ARGS=()
if [[ -n "${MODEL:-}" ]]; then
    [[ "$MODEL" != */* && -f "scripts/models/$MODEL.sh" ]] || stop "MODEL=$MODEL has no file scripts/models/$MODEL.sh; see that folder."
    # shellcheck source=/dev/null
    source "scripts/models/$MODEL.sh"
fi

# Another spelling of this flag, which the job may have, would contradict it.
SAVE_INTERVAL=(--save-interval 1000)
[[ -z "$(value_of --persistent-save-interval "$@")" ]] || SAVE_INTERVAL=()

# The same command starts and resumes the run. Later flags win over earlier ones, so the arguments can override these.
# shellcheck disable=SC2034  # the scripts that source this use it
RUN_ARGS=(
    ${MODEL_ARGS[@]+"${MODEL_ARGS[@]}"}
    --train-iters "$TRAIN_ITERS"
    --save "$SAVE"
    --load "$SAVE"
    ${LAST_GOOD[@]+"${LAST_GOOD[@]}"}
    ${SAVE_INTERVAL[@]+"${SAVE_INTERVAL[@]}"}
    --keep-last 3
    --exit-signal-handler
    "$@"
)

# Prints when this job ends, in seconds since 1970; nothing if Slurm does not say. Versions without SLURM_JOB_END_TIME say it to squeue.
job_end() {
    local end="${SLURM_JOB_END_TIME:-}"
    [[ -n "$end" ]] || end="$(date --date "$(squeue -h -j "$SLURM_JOB_ID" -o %e 2>/dev/null)" +%s 2>/dev/null || true)"
    if is_number "$end" 1 999999999999999; then
        echo "$end"
    fi
}

# Whether Slurm is taking the nodes of this job for one of higher priority. It forgets this when the job is requeued.
is_preempted() {
    [[ "$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null || true)" =~ PreemptTime=[0-9] ]]
}

# requeue_until_done BEFORE CODE: BEFORE is the iteration saved before the run, CODE the run's exit code. Puts this job back into the queue
# if the run has left with code 0 and another iteration that is not the last (an earlier one after --load-last-good-checkpoint), or if the
# job is preempted: then its ranks may have been killed at any moment. Any other failure, and a run that saved nothing new, is not repeated.
requeue_until_done() {
    local before="$1" code="$2" now
    now="$(saved_iteration "$SAVE")"
    if ((code == 0 && now >= TRAIN_ITERS)); then
        echo "done: iteration $now is saved in $SAVE"
    elif is_preempted; then
        echo "iteration $now of $TRAIN_ITERS is saved in $SAVE; job $SLURM_JOB_ID is preempted and goes back into the queue"
        scontrol requeue "$SLURM_JOB_ID"
    elif ((code != 0)); then
        exit "$code"
    elif ((now != before)); then
        echo "iteration $now of $TRAIN_ITERS is saved in $SAVE; job $SLURM_JOB_ID goes back into the queue"
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "error: nothing was saved beyond iteration $before; the job is not repeated." >&2
        exit 1
    fi
}

#!/usr/bin/env bash
# Trains a GPT from scratch on the sources of Python's standard library. See --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
    cat <<'TEXT'
bash scripts/quickstart.sh [--no-venv] [--fresh]

  --no-venv   use the active environment instead of .venv
  --fresh     start anew; without it, steps whose results are in runs/quickstart are not done again

Trains a GPT of 5 million parameters with ZeRO++ (ZeRO-3 with qwZ, hpZ and qgZ) on four CPU ranks as two nodes of two, or
on one rank per GPU if there are GPUs. Then runs ZeRO-3, ZeRO++ and lean side by side for a few iterations.
Takes about three minutes on two CPU cores, and needs no network once the requirements are installed.
TEXT
}

use_venv=yes
is_fresh=no
for argument in "$@"; do
    case "$argument" in
        --no-venv) use_venv=no ;;
        --fresh) is_fresh=yes ;;
        -h | --help) usage && exit ;;
        *) usage >&2 && stop "$argument is not an argument of this script." ;;
    esac
done

readonly RUN=runs/quickstart
readonly CORPUS="$RUN/corpus.jsonl" TOKENIZER="$RUN/tokenizer.model" DATA="$RUN/corpus_text_document"
readonly CHECKPOINTS="$RUN/checkpoints" LOG="$RUN/log.jsonl" SAMPLE="$RUN/sample.txt" PICTURE="$RUN/run.png"
readonly TABLE="$RUN/compared.md"
readonly FIRST_ITERATIONS=75 ALL_ITERATIONS=90 COMPARED_ITERATIONS=12
readonly SAMPLES_PER_ITERATION=32 VOCAB_SIZE=2048 SPLIT=95,4,1

MODEL=(--num-layers 6 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --attention-dropout 0 --hidden-dropout 0)
TRAINING=(--global-batch-size "$SAMPLES_PER_ITERATION" --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
    --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 15 --lr-decay-iters "$ALL_ITERATIONS")
TEXT=(--data-path "$DATA" --split "$SPLIT" --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model "$TOKENIZER" --num-workers 0)
RHYTHM=(--log-interval 5 --eval-interval 30 --eval-iters 8 --save-interval 30
    --save "$CHECKPOINTS" --load "$CHECKPOINTS" --log-jsonl "$LOG")

main() {
    prepare_environment "$use_venv" requirements.txt
    if [[ "$is_fresh" == yes ]]; then
        rm -rf "$RUN"
    fi
    mkdir -p "$RUN"
    choose_ranks

    step "Kernels for quantization and dropout"
    bash scripts/build_extensions.sh --no-venv

    step "Corpus: the sources of Python's standard library"
    made "$CORPUS" || python tools/collect_corpus.py --output "$CORPUS" --max-megabytes 20

    step "Tokenizer: SentencePiece BPE"
    made "$TOKENIZER" || python tools/train_tokenizer.py --input "$CORPUS" --model-prefix "${TOKENIZER%.model}" \
        --vocab-size "$VOCAB_SIZE" --max-megabytes 5

    step "Text to tokens"
    made "$DATA.idx" || python tools/preprocess_data.py --input "$CORPUS" --output-prefix "${DATA%_text_document}" --append-eod --resume \
        --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model "$TOKENIZER"

    step "Training, iterations 1 to $FIRST_ITERATIONS"
    train_to "$FIRST_ITERATIONS"

    step "Resuming from the checkpoint, iterations $((FIRST_ITERATIONS + 1)) to $ALL_ITERATIONS"
    train_to "$ALL_ITERATIONS"

    step "A sample of what the model writes"
    python tools/generate_text.py --load "$CHECKPOINTS" --prompt "    def __init__(self" \
        --max-new-tokens 120 --temperature 0.5 --top-k 40 | tee "$SAMPLE"

    step "Loss, learning rate and bytes per link"
    python tools/plot_run.py --log-jsonl "$LOG" --output "$PICTURE"

    step "ZeRO-3 beside ZeRO++ and lean, $COMPARED_ITERATIONS iterations each"
    compare plain
    compare zeropp "${ZEROPP[@]}"
    compare lean --zeropp lean
    python tools/compare_runs.py --log-jsonl "$RUN"/compared_{plain,zeropp,lean}.jsonl --names ZeRO-3 ZeRO++ lean | tee "$TABLE"

    step "Verdict"
    verdict
    echo "In $RUN: ${PICTURE##*/}, ${TABLE##*/}, ${SAMPLE##*/}, ${LOG##*/} and ${CHECKPOINTS##*/}; ${SECONDS} s in all."
}

# One rank per GPU; without GPUs, four ranks on the CPU as two nodes of two, in bf16 if the processor multiplies it natively.
choose_ranks() {
    local gpus
    gpus="$(python -c 'import torch; print(torch.cuda.device_count())')"
    if ((gpus > 0)); then
        RANKS=1
        while ((2 * RANKS <= gpus && 2 * RANKS <= SAMPLES_PER_ITERATION)); do RANKS=$((2 * RANKS)); done
        PRECISION=(--bf16)
    else
        RANKS=4
        PRECISION=()
        if grep -qsE 'avx512_bf16|amx_bf16' /proc/cpuinfo; then PRECISION=(--bf16); fi
        export OMP_NUM_THREADS=1
    fi
    local ranks_per_node="$((RANKS > 1 ? RANKS / 2 : 1))"
    SHARDING=(--zero-stage 3 --ranks-per-node "$ranks_per_node" --micro-batch-size "$((SAMPLES_PER_ITERATION / RANKS))")
    ZEROPP=(--zero-quantized-weights --zero-hpz-partition-size "$ranks_per_node" --zero-quantized-gradients)
}

train_to() {
    if (($(saved_iteration "$CHECKPOINTS") >= $1)); then
        echo "done before: $CHECKPOINTS has iteration $1"
        return
    fi
    pretrain "${RHYTHM[@]}" "${ZEROPP[@]}" --train-iters "$1"
}

# compare NAME FLAG...: runs the first iterations once more, with these ZeRO++ flags and no others.
compare() {
    local log="$RUN/compared_$1.jsonl" output="$RUN/compared_$1.txt"
    shift
    if ! made "$log"; then
        pretrain --log-interval 1 --eval-iters 0 --log-jsonl "$log.new" --train-iters "$COMPARED_ITERATIONS" "$@" >"$output" 2>&1 ||
            { tail -n 20 "$output" >&2 && stop "the run failed; $output has all it said."; }
        mv "$log.new" "$log"
    fi
}

pretrain() {
    python -m torch.distributed.run --standalone --nproc_per_node "$RANKS" pretrain_zeropp_gpt.py \
        "${MODEL[@]}" "${TRAINING[@]}" "${TEXT[@]}" "${SHARDING[@]}" ${PRECISION[@]+"${PRECISION[@]}"} "$@"
}

# Fails if the model's loss is not at least one nat per token below that of knowing token frequencies alone.
verdict() {
    local statistics
    statistics="$(python tools/corpus_statistics.py --data-path "$DATA" --split "$SPLIT" --vocab-size "$VOCAB_SIZE")"
    python - "$LOG" "$(tail -n 1 <<<"$statistics")" <<'PYTHON'
import json
import sys

with open(sys.argv[1], encoding="utf-8") as log:
    losses = [values["validation_loss"] for values in map(json.loads, log) if "validation_loss" in values]
unigram = json.loads(sys.argv[2])["unigram_cross_entropy_nats"]
gain = unigram - losses[-1]
print(f"validation loss of the model              {losses[-1]:.4f} nats per token")
print(f"that of knowing token frequencies alone   {unigram:.4f} nats per token")
if not gain >= 1.0:
    sys.exit(f"FAILED: the model is {gain:.2f} nats below it, expected is at least 1; see the training lines above.")
print(f"PASSED: the model is {gain:.2f} nats below it, expected is at least 1.")
PYTHON
}

step() {
    echo
    echo "== $* (${SECONDS} s after the start)"
}

made() {
    [[ -s "$1" ]] && echo "done before: $1"
}

main

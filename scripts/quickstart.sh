#!/usr/bin/env bash
# Trains a GPT from scratch on the sources of Python's standard library. See --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
source "$(dirname "${BASH_SOURCE[0]}")/ticker.sh"

usage() {
    cat <<'TEXT'
bash scripts/quickstart.sh [--no-venv] [--fresh]

  --no-venv   use the active environment instead of .venv
  --fresh     start anew; without it, steps whose results are in runs/quickstart are not done again

Trains a GPT of 5 million parameters with ZeRO++ (ZeRO-3 with qwZ, hpZ and qgZ) on four CPU ranks as two nodes of two, or
on one rank per GPU if there are GPUs. Then runs ZeRO-3, ZeRO++ and lean side by side for a few iterations. At its end it shows the losses,
the bytes and a sample of what the model writes.
Takes about three minutes on two CPU cores, and needs no network once the requirements are installed.
TEXT
}

use_venv=yes
is_fresh=no
is_good=yes
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
readonly TABLE="$RUN/compared.md" VERDICT="$RUN/verdict.txt" STATISTICS="$RUN/statistics.json"
readonly FIRST_ITERATIONS=75 ALL_ITERATIONS=90 COMPARED_ITERATIONS=12
readonly COMPARED=("$RUN"/compared_{plain,zeropp,lean}.jsonl)
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
    local is_whole=no  # whether no step is left out, so that its time is that of the whole
    if [[ ! -e "$RUN" ]]; then is_whole=yes; fi
    mkdir -p "$RUN"
    readonly STARTED="$SECONDS"
    choose_ranks

    step "Kernels for quantization and dropout"
    ticking bash scripts/build_extensions.sh --no-venv

    step "Corpus: the sources of Python's standard library"
    made "$CORPUS" || ticking python tools/collect_corpus.py --output "$CORPUS" --max-megabytes 20

    step "Tokenizer: SentencePiece BPE"
    made "$TOKENIZER" || ticking python tools/train_tokenizer.py --input "$CORPUS" --model-prefix "${TOKENIZER%.model}" \
        --vocab-size "$VOCAB_SIZE" --max-megabytes 5

    step "Text to tokens"
    made "$DATA.idx" || ticking python tools/preprocess_data.py --input "$CORPUS" --output-prefix "${DATA%_text_document}" --append-eod --resume \
        --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model "$TOKENIZER"

    step "Training, iterations 1 to $FIRST_ITERATIONS"
    train_to "$FIRST_ITERATIONS"

    step "Resuming from the checkpoint, iterations $((FIRST_ITERATIONS + 1)) to $ALL_ITERATIONS"
    train_to "$ALL_ITERATIONS"

    step "A sample of what the model writes"
    ticking python tools/generate_text.py --load "$CHECKPOINTS" --prompt "    def __init__(self" \
        --max-new-tokens 120 --temperature 0.8 --top-k 40 >"$SAMPLE"

    step "ZeRO-3 beside ZeRO++ and lean, $COMPARED_ITERATIONS iterations each"
    compare plain ZeRO-3
    compare zeropp ZeRO++ "${ZEROPP[@]}"
    compare lean lean --zeropp lean

    step "Pictures, tables and the frequencies of tokens"
    ticking python tools/plot_run.py --log-jsonl "$LOG" --output "$PICTURE"
    ticking python tools/compare_runs.py --log-jsonl "${COMPARED[@]}" --names ZeRO-3 ZeRO++ lean >"$TABLE"

    ticking python tools/corpus_statistics.py --data-path "$DATA" --split "$SPLIT" --vocab-size "$VOCAB_SIZE" >"$STATISTICS"

    step "What came out"
    verdict >"$VERDICT" || is_good=no
    if [[ "$is_whole" == yes ]]; then echo "{\"seconds\": $((SECONDS - STARTED))}" >"$RUN/seconds.json"; fi
    show
    [[ "$is_good" == yes ]] || stop "the model has not learned enough; see the verdict above."
}

# Shows what came out.
show() {
    echo "Loss of the run:"
    python tools/watch_run.py --once --log-jsonl "$LOG" --names "ZeRO++ on $RANKS ranks"
    echo
    echo "Loss of the compared runs:"
    python tools/watch_run.py --once --log-jsonl "${COMPARED[@]}" --names ZeRO-3 ZeRO++ lean
    echo
    cat "$TABLE"
    echo
    echo "What the model writes after \"    def __init__(self\":"
    cat "$SAMPLE"
    echo
    cat "$VERDICT"
    cat <<TEXT

In $RUN: ${PICTURE##*/}, ${TABLE##*/}, ${SAMPLE##*/}, ${LOG##*/} and ${CHECKPOINTS##*/}; ${SECONDS} s in all.

Your own text next, as JSON lines with the key "text", and tools/watch_run.py --log-jsonl my_run.jsonl in another terminal:
  python tools/train_tokenizer.py --input my_text.jsonl --model-prefix my_tokenizer --vocab-size 8192
  python tools/preprocess_data.py --input my_text.jsonl --output-prefix my_text --append-eod \\
      --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model my_tokenizer.model
  torchrun --nproc_per_node $RANKS pretrain_zeropp_gpt.py ${MODEL[*]} \\
      ${PRECISION[*]:+${PRECISION[*]} }--zeropp lean --ranks-per-node $RANKS_PER_NODE --micro-batch-size 8 --train-iters 1000 --lr 1e-3 \\
      --data-path my_text_text_document --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model my_tokenizer.model \\
      --save my_checkpoints --load my_checkpoints --save-interval 100 --log-jsonl my_run.jsonl
TEXT
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
    RANKS_PER_NODE="$((RANKS > 1 ? RANKS / 2 : 1))"
    SHARDING=(--zero-stage 3 --ranks-per-node "$RANKS_PER_NODE" --micro-batch-size "$((SAMPLES_PER_ITERATION / RANKS))")
    ZEROPP=(--zero-quantized-weights --zero-hpz-partition-size "$RANKS_PER_NODE" --zero-quantized-gradients)
}

train_to() {
    if (($(saved_iteration "$CHECKPOINTS") >= $1)); then
        echo "done before: $CHECKPOINTS has iteration $1"
        return
    fi
    ticking pretrain "${RHYTHM[@]}" "${ZEROPP[@]}" --train-iters "$1"
}

# compare FILE NAME FLAG...: runs the first iterations once more, with these ZeRO++ flags and no others.
compare() {
    local log="$RUN/compared_$1.jsonl" output="$RUN/compared_$1.txt" name="$2"
    shift 2
    if ! made "$log"; then
        rm -f "$log.new"
        ticking shortly "$name" "$output" pretrain --log-interval 1 --eval-iters 0 --log-jsonl "$log.new" \
            --train-iters "$COMPARED_ITERATIONS" "$@" ||
            { tail -n 20 "$output" >&2 && stop "the run failed; $output has all it said."; }
        mv "$log.new" "$log"
    fi
}

# shortly NAME OUTPUT COMMAND...: writes all that a run prints into OUTPUT, and shows its iterations and losses.
shortly() {
    local name="$1" output="$2" line
    shift 2
    "$@" 2>&1 | tee "$output" | while IFS= read -r line; do
        if [[ "$line" =~ ^" iteration "\ *([0-9]+)/\ *([0-9]+)\ .*"lm loss: "([^ ]+) ]]; then
            echo "$name: iteration ${BASH_REMATCH[1]} of ${BASH_REMATCH[2]}, loss ${BASH_REMATCH[3]}"
        fi
    done
}

pretrain() {
    python -m torch.distributed.run --standalone --nproc_per_node "$RANKS" pretrain_zeropp_gpt.py \
        "${MODEL[@]}" "${TRAINING[@]}" "${TEXT[@]}" "${SHARDING[@]}" ${PRECISION[@]+"${PRECISION[@]}"} "$@"
}

# Fails if the model's loss is not at least one nat per token below that of knowing token frequencies alone.
verdict() {
    python - "$LOG" "$STATISTICS" <<'PYTHON'
import json
import sys

with open(sys.argv[1], encoding="utf-8") as log:
    losses = [values["validation_loss"] for values in map(json.loads, log) if "validation_loss" in values]
with open(sys.argv[2], encoding="utf-8") as statistics:
    unigram = json.loads(statistics.readlines()[-1])["unigram_cross_entropy_nats"]
gain = unigram - losses[-1]
print(f"validation loss of the model              {losses[-1]:.4f} nats per token")
print(f"that of knowing token frequencies alone   {unigram:.4f} nats per token")
if not gain >= 1.0:
    print(f"FAILED: the model is {gain:.2f} nats below it, expected is at least 1; see the training lines above.")
    sys.exit(1)
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

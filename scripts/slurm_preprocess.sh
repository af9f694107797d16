#!/usr/bin/env bash
# Turns text into tokens on many nodes: a Slurm array in which each task turns its share of the files into a corpus, then one job that
# joins the corpora in order. Start it on a machine with sbatch, from the root of the repository:
#
#   SHARES=16 bash scripts/slurm_preprocess.sh FOLDER OUTPUT_PREFIX --append-eod \
#       --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model my_tokenizer.model
#
# FOLDER has JSON lines (*.jsonl, also .gz or .zst); further arguments are flags of tools/preprocess_data.py. The result,
# OUTPUT_PREFIX_text_document.bin and .idx, has the same bytes as that of one process over all files in the order of their names.
#
#   SHARES           tasks of the array (default: one per file, 64 at most)
#   SBATCH_OPTIONS   further options for both jobs, for example: --partition cpu --account me
#
# If the same command is given again, interrupted tasks continue, and finished tasks are not repeated.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if (($# < 2)); then
    echo "error: give a folder of JSON lines and the prefix of the corpus; see the comment at the top of $0." >&2
    exit 2
fi
folder="$1" output="$2"
shift 2

mapfile -t files < <(find "$folder" -name '*.jsonl' -o -name '*.jsonl.gz' -o -name '*.jsonl.zst' | LC_ALL=C sort)
if ((${#files[@]} == 0)); then
    echo "error: $folder has no .jsonl, .jsonl.gz or .jsonl.zst; correct the folder." >&2
    exit 2
fi
SHARES="${SHARES:-$((${#files[@]} < 64 ? ${#files[@]} : 64))}"
if ((SHARES < 1 || SHARES > ${#files[@]})); then
    echo "error: SHARES=$SHARES does not fit ${#files[@]} files; choose 1 to ${#files[@]}." >&2
    exit 2
fi

parts="${output}_parts"
mkdir -p "$parts"
printf '%s\n' "${files[@]}" >"$parts/files.txt"

read -r -a options <<<"${SBATCH_OPTIONS:-}"
job="$(sbatch --parsable ${options[@]+"${options[@]}"} --array "0-$((SHARES - 1))" scripts/slurm_preprocess.sbatch "$parts" "$@")"
job="${job%%;*}" # sbatch adds the name of the cluster if there are several
sbatch ${options[@]+"${options[@]}"} --dependency "afterok:$job" scripts/slurm_merge.sbatch "$parts" "$output" "$SHARES"

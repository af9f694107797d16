#!/usr/bin/env bash
# Turns text into tokens on many nodes: a Slurm array in which each task turns its share of the files into a corpus, then one job that
# joins the corpora in order. Start it on a machine with sbatch, from the root of the repository:
#
#   SHARES=16 bash scripts/slurm_preprocess.sh FOLDER OUTPUT_PREFIX --append-eod \
#       --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model my_tokenizer.model
#
# FOLDER has JSON lines, in the files that tools/preprocess_data.py reads of a folder; further arguments are flags of that tool. The
# result, OUTPUT_PREFIX_text_document.bin and .idx, has the same bytes as that of one process with --input FOLDER.
#
#   SHARES           tasks of the array (default: one per file, 64 at most)
#   SBATCH_OPTIONS   further options for both jobs, for example: --partition cpu --account me
#
# If the same command is given again, interrupted tasks continue. Finished tasks are repeated only if their files, the tokenizer or a flag
# have changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/checks.sh

(($# >= 2)) || stop "give a folder of JSON lines and the prefix of the corpus; see the comment at the top of $0."
folder="$1" output="$2"
shift 2
refuse_dash FOLDER "$folder"
refuse_dash OUTPUT_PREFIX "$output"
[[ -d "$folder" ]] || stop "$folder is not a folder; give a folder of JSON lines."

mapfile -t -d '' files < <(python tools/preprocess_data.py --list-inputs --input "$folder" --output-prefix "$output")
wait "$!" # set -e ends the script if the files could not be listed
SHARES="${SHARES:-$((${#files[@]} < 64 ? ${#files[@]} : 64))}"
is_number "$SHARES" 1 "${#files[@]}" || \
    stop "SHARES=$SHARES is not a number from 1 to ${#files[@]}, which is how many files $folder has; choose such a number."
SHARES="$((10#$SHARES))"

parts="${output}_parts"
mkdir -p "$parts"
printf '%s\0' "${files[@]}" >"$parts/files"

read -r -a options <<<"${SBATCH_OPTIONS:-}"
job="$(sbatch --parsable ${options[@]+"${options[@]}"} --array "0-$((SHARES - 1))" scripts/slurm_preprocess.sbatch "$parts" "$@")"
job="${job%%;*}" # sbatch adds the name of the cluster if there are several
sbatch ${options[@]+"${options[@]}"} --dependency "afterok:$job" --kill-on-invalid-dep yes scripts/slurm_merge.sbatch "$parts" "$output" "$SHARES"

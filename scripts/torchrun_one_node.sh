#!/usr/bin/env bash
# Trains on the GPUs of this machine, one rank each. All arguments are flags of the run:
#
#   bash scripts/torchrun_one_node.sh --num-layers 24 --hidden-size 2048 ... --zero-stage 3 --save runs/gpt --load runs/gpt
#
# RANKS is the number of ranks (default: the number of GPUs). Without GPUs, set it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/checks.sh
source scripts/cluster_environment.sh

RANKS="${RANKS:-$(gpus)}"
[[ "$RANKS" != 0 ]] || stop "nvidia-smi shows no GPU; set RANKS to the number of ranks."
require_number RANKS 1 4096

# --standalone: a free port of this machine, so that several runs can share it.
exec torchrun --standalone --nproc_per_node "$RANKS" pretrain_zeropp_gpt.py "$@"

#!/usr/bin/env bash
# One rank of the ZeRO++ tutorial's run: 18 billion parameters, 4 nodes of 16 GPUs with 32 GB each. A launcher starts it once per rank.
#
# Slurm, within an allocation of 4 nodes; if MASTER_ADDR is not set, it is the first node:
#   srun --nodes 4 --ntasks-per-node 16 --gpus-per-node 16 bash scripts/zeropp_18b.sh
#
# torchrun, the same line on each of the 4 nodes:
#   torchrun --nnodes 4 --nproc_per_node 16 --rdzv_backend c10d --rdzv_endpoint node0:29500 --no_python bash scripts/zeropp_18b.sh
#
# On nodes of another size, set zero_hpz_partition_size in the JSON to their number of ranks. Without --data-path and --train-iters it
# trains 50 iterations on mock data; these and other flags may follow the script's name.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

exec python -u pretrain_zeropp_gpt.py \
    --tensor-model-parallel-size 1 \
    --pipeline-model-parallel-size 1 \
    --num-layers 40 \
    --hidden-size 6144 \
    --seq-length 512 \
    --num-attention-heads 32 \
    --batch-size 1 \
    --zero-stage 3 \
    --deepspeed_config scripts/ds_zeropp_config.json \
    --deepspeed-activation-checkpointing \
    --fp16 \
    --checkpoint-activations \
    "$@"

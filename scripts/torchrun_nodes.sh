#!/usr/bin/env bash
# Trains on the GPUs of several nodes: start it on each of them, with the same arguments, which are flags of the run:
#
#   NODES=4 NODE_RANK=0 MASTER_ADDR=node0 bash scripts/torchrun_nodes.sh --num-layers 24 --hidden-size 2048 ...
#
#   NODES        how many nodes
#   NODE_RANK    which of them this is, from 0
#   MASTER_ADDR  host name or address of node 0, as the others know it
#   MASTER_PORT  a free port there (default: 29500)
#   RANKS        ranks of each node (default: its GPUs)
#
# tools/launch.py starts all nodes at once from a hostfile; scripts/slurm_*.sbatch are for Slurm.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/cluster_environment.sh

: "${NODES:?set it to the number of nodes}"
: "${NODE_RANK:?set it to the place of this node, from 0}"
: "${MASTER_ADDR:?set it to the host of node 0}"

exec torchrun \
    --nnodes "$NODES" \
    --node_rank "$NODE_RANK" \
    --nproc_per_node "${RANKS:-gpu}" \
    --master_addr "$MASTER_ADDR" \
    --master_port "${MASTER_PORT:-29500}" \
    pretrain_zeropp_gpt.py "$@"

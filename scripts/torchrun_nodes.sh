#!/usr/bin/env bash
# Trains on the GPUs of several nodes. Start it on each node with the same arguments, which are flags of the run:
#
#   NODES=4 NODE_RANK=0 MASTER_ADDR=node0 bash scripts/torchrun_nodes.sh --num-layers 24 --hidden-size 2048 ...
#
#   NODES        number of nodes
#   NODE_RANK    index of this node, from 0
#   MASTER_ADDR  host name or address at which the other nodes reach node 0
#   MASTER_PORT  a free port of node 0 (default: 29500)
#   RANKS        ranks of each node (default: its GPUs). Without GPUs, set it
#
# Training lines are printed by the last rank, so they appear on the last node, as in Megatron.
#
# tools/launch.py starts all nodes at once from a hostfile; scripts/slurm_*.sbatch are for Slurm.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/checks.sh
source scripts/cluster_environment.sh

require_set NODES "the number of nodes"
require_number NODES 1 1000000
require_set NODE_RANK "the index of this node, from 0"
require_number NODE_RANK 0 "$((NODES - 1))"
require_set MASTER_ADDR "the host of node 0"
require_host MASTER_ADDR
MASTER_PORT="${MASTER_PORT:-29500}"
require_number MASTER_PORT 1 65535
if ((NODE_RANK == 0)); then require_free_port MASTER_PORT; fi
if [[ -n "${RANKS:-}" ]]; then require_number RANKS 1 4096; fi
[[ -n "${RANKS:-}" || "$(gpus)" != 0 ]] || stop "nvidia-smi shows no GPU; set RANKS to the number of ranks of each node."

# torchrun waits for the other nodes for many minutes, and says nothing.
echo "node $NODE_RANK of $NODES meets the others at $MASTER_ADDR, port $MASTER_PORT"
exec torchrun \
    --nnodes "$NODES" \
    --node_rank "$NODE_RANK" \
    --nproc_per_node "${RANKS:-gpu}" \
    --master_addr "$MASTER_ADDR" \
    --master_port "$MASTER_PORT" \
    pretrain_zeropp_gpt.py "$@"

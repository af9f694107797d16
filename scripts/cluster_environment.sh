# Sourced by the launch scripts beside it: sets variables of every rank, unless you have set them.
# shellcheck shell=bash

# Ranks share the cores of a node; with a thread pool in each, they would slow each other down.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# Prints only what goes wrong. INFO shows which interfaces and topology NCCL has found, and is the first thing to try when it hangs.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"

# On InfiniBand or RoCE, a lost packet counts as a broken link after 4.096 us x 2^22 = 17 s. NCCL's default is 4 s (20), but large
# fabrics pause for longer, and then a healthy run would end.
export NCCL_IB_TIMEOUT="${NCCL_IB_TIMEOUT:-22}"

# Weights grow from a slice to a whole unit and shrink again all the time. Segments that can grow fragment GPU memory less.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"

# Seconds that torchrun gives its ranks to save after a signal (newer versions of torch; older ones give 30).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}"

# What depends on the cluster is not set here (docs/launching.md): NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, the network interface
# between nodes, if the first one found is wrong; NCCL_IB_HCA, the adapters to use; NCCL_IB_SL, the service level.

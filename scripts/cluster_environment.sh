# Sourced by the launch scripts beside it: variables of every rank. What you have set already stays.

# Ranks share the cores of a node; a thread pool in each would only stand in the others' way.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# Only what goes wrong; INFO shows which interfaces and topology NCCL has found, and is the first thing to try when it hangs.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"

# 4.096 us x 2^22 = 17 s before a lost packet counts as a broken link on InfiniBand or RoCE: large fabrics pause for longer than
# NCCL's own 4 s (20), and then a healthy run would end.
export NCCL_IB_TIMEOUT="${NCCL_IB_TIMEOUT:-22}"

# Weights grow from a slice to a whole unit and shrink again all the time; segments that can grow leave fewer holes in GPU memory.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"

# Seconds that torchrun leaves its ranks to save after a signal (newer versions of torch; older ones leave 30).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}"

# What depends on the cluster is not set here (docs/launching.md): NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, the network interface
# over which nodes meet, where the first one found is the wrong one; NCCL_IB_HCA, the adapters to use; NCCL_IB_SL, the service level.

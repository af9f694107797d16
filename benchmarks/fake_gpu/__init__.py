"""GPUs that compute nothing, for torch with CUDA on a machine without a GPU."""

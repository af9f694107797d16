"""What tests and benchmarks share: ranks, slow networks, and kernels beside their reference. Nothing of it is installed."""

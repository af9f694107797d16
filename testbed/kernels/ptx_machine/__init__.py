"""A GPU that runs the PTX of the CUDA kernels, on memory of this process.

PTX is what nvcc makes of a kernel before ptxas translates it, one to one in its arithmetic, for a GPU. So here the compiler's work is part
of what is tested: its options, intrinsics, conversions, and which threads it lets reach a barrier. All threads of a grid run together, as
arrays of numpy with an element per thread (machine.py); every access to memory is checked (memory.py); what arithmetic does stands in
NVIDIA's PTX ISA 9.0 and nowhere else (arithmetic.py). Kernels are started by the launchers of csrc, as they are (launches.py).

Only the instructions that the kernels have are known; another one ends the run.
"""

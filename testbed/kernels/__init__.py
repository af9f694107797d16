"""Kernels beside their reference, bit for bit: on a GPU, compiled for the CPU (emulation.py), and as nvcc's PTX on a machine for it."""

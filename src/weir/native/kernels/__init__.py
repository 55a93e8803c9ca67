"""Numba kernels of the CPU engine: matrix products of few rows, blocks, and whole decode steps."""

"""Kernels for GPUs, written in Triton or in CUDA, and the building of the CUDA ones."""

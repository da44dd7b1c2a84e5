"""Triton kernels of dualmla, written for ROCm and running on CUDA and in Triton's interpreter. Imports torch and triton alone."""

"""Kernels for CUDA devices in Triton and Gluon: one file an op, its torch reference beside it."""

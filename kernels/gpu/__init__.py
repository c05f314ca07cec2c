"""Kernels for CUDA devices: Triton and Gluon, one file an op, each beside its torch reference. See docs/architecture.md."""

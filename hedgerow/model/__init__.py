"""Configuration, weights and forward passes; knows kernels, not requests."""

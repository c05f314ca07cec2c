"""Ops of the model: one file an op. Empty on purpose: another package of this name is probed by transformers."""

"""Hedgerow: exact tree-speculative serving of Kimi K2-class models."""

__version__ = "0.1.0"

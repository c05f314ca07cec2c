"""Proposes trees with a DFlash drafter."""

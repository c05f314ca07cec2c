"""Holds the target model and drives the decode steps."""

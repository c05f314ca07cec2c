"""The services, one process each. None imports another."""

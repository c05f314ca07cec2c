"""The shipped services in one deterministic process: virtual time, network and Redis in memory, faults from a seed."""

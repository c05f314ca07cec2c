"""Client-facing service: owns sessions by lease, tokenizes, commits before it releases."""

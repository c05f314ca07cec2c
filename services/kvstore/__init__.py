"""The commit log: fenced appends over Redis."""

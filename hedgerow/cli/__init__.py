"""The `hedgerow` command."""

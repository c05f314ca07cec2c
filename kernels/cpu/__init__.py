"""The compiled CPU engine's C sources, and how they are built."""

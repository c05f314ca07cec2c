"""Training code of the bundled target and drafter; see README.md in this folder."""

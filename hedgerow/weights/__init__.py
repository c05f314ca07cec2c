"""Checkpoint folders before they are served: what one is and needs, its parts for ranks, made-up ones to rehearse."""

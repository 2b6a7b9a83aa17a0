"""Runs: list the checkpoints of a training, decide which to keep, and delete the others."""

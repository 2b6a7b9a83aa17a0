"""Runs: the checkpoints of one training, which of them stay, and how the others are deleted."""

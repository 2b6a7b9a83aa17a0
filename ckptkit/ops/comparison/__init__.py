"""Comparing: what is not the same in two checkpoints."""

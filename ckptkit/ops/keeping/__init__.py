"""Keeping: which checkpoints of a run stay."""

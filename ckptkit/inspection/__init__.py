"""Describe a checkpoint: its groups, ties and modules."""

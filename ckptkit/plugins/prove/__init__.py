"""Prove that an exported model computes the same as the training state."""

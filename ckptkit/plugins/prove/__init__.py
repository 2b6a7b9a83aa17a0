"""Prove that an exported model computes what the training state computes."""

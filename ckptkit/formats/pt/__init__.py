"""Checkpoints that are one file of torch.save."""

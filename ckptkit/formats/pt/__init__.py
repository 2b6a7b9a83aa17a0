"""Hold checkpoints that are one file of torch.save."""

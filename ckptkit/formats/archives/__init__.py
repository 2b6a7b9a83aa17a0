"""The archives of torch.save: zip entries, their tensors and their state dicts."""

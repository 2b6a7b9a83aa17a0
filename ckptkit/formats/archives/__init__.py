"""The archives of torch.save: zip entries, the tensors in them, and the state dicts that they hold."""

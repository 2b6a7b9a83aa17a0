"""Several files of torch.save, with an index that says which tensor is in which file."""

"""Several files of torch.save, with an index that maps tensors to files."""

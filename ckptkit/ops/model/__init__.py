"""The model in a checkpoint: which tensors it is, what they are called, what its config expects."""

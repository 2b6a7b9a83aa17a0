"""The format of the package torch_checkpointing: files of each rank, and metadata with the positions of tensors."""

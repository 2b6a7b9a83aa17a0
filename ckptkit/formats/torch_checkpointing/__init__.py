"""Handle what the package torch_checkpointing leaves: files of each rank, and metadata that say how tensors lie."""

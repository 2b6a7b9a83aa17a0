"""Read Megatron's legacy checkpoints: a directory with a file of torch.save for each rank of tensors and pipeline."""

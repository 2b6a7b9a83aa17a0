"""Handle directories in which each rank stored its shards of model and optimizer in its own files of torch.save."""

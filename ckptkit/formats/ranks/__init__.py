"""Handle directories in which each rank has left files of its own, by torch.save: its shards of model and optimizer."""

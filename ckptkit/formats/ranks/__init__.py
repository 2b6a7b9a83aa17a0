"""Handle directories with files of torch.save per rank: each rank's shards of model and optimizer."""

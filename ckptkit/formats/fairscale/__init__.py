"""Handle the shards of fairscale's FullyShardedDataParallel: flat parameters that say what they are made of."""

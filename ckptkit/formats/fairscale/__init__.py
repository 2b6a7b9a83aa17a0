"""The shards of fairscale's FullyShardedDataParallel: flat parameters with a list of their parts."""

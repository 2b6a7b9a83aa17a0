"""What one rank saved of a tensor (DTensor, ShardedTensor), and how the shards of all ranks become one tensor."""

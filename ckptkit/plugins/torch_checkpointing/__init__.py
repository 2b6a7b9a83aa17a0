"""Read and write checkpoints of the package torch_checkpointing: per-rank files, and metadata with shard positions."""

"""Read Megatron checkpoints and adapters: legacy per-rank files, tensor names, arguments."""

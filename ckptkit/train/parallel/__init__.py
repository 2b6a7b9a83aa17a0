"""Parallelism: ranks, and a model spread over them by either FSDP. Knows no data and no checkpoints."""

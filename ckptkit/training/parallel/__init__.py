"""Spread a model over ranks by either FSDP. Knows no data and no checkpoints."""

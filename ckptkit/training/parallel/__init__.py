"""Shard a model over ranks with FSDP1 or FSDP2."""

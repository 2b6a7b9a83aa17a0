"""Spread a model over ranks by either FSDP."""

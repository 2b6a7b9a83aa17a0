"""Salvage a damaged checkpoint: find the damage, use copies if there are any, and account for the lost tensors."""

"""Tensors without any file: what elements they have, where each lies in them, and what its number is."""

"""Optimizer states: keyed by name or index, missing states, flat parameters."""

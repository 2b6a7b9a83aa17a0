"""Optimizer states: by name and by number, missing states, flat parameters."""

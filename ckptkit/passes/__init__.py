"""Passes: what else workers do with every block of a layout but copy it: check, count, compare, average, read."""

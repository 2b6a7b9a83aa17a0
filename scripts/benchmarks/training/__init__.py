"""The benchmark of training: loops that are measured, and the tables of what they took."""

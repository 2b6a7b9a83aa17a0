"""Write, read, check and apply deltas: the changes between two versions of a model."""

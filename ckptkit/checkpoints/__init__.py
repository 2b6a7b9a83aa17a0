"""A checkpoint: its files, run, manifest, trainer, and the model in it."""

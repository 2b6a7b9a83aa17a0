"""Hold what a checkpoint is: its files, run, manifest, trainer, and the model in it."""

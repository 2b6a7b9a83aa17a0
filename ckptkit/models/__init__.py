"""The model that a config.json describes, and the names of its tensors."""

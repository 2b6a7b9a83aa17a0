"""What a config.json describes, and what the tensors of a model are called."""

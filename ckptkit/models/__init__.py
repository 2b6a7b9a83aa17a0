"""What a config.json describes: parameters, shapes, ties, linear layers, and the other small files of a model."""

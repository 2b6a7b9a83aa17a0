"""What a config.json describes: parameters, shapes, ties, linear layers, and the small files beside the weights."""

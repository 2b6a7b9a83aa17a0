"""Know quantized weights: small numbers with scales beside them. By names, shapes and a config.json alone."""

"""Build the models to train: the built-in Llama, and those of transformers."""

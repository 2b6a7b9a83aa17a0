"""Build the models to train: the built-in Llama and models of transformers."""

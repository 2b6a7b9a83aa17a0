"""Models: what the loop trains, the built-in Llama and those of transformers. Knows no ranks and opens no weights."""

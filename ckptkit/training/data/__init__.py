"""Read text and tokenize it into batches of token ids, in one global order for all ranks."""

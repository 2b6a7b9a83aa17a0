"""Turn text into batches of token ids in one global order."""

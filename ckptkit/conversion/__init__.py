"""Convert: the one pipeline behind every command that writes a checkpoint, and its options."""

"""Push checkpoints to the Hugging Face Hub, and pull them from it."""

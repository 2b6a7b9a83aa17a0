"""Share checkpoints: copy them, push them to the Hub, and pull them from the Hub."""

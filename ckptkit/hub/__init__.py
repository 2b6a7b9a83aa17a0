"""Share checkpoints: push to the Hub and pull from it."""

"""Save and load the state of a running training, from any training loop."""

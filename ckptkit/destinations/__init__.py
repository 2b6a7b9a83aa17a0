"""Where an output appears: whole, or not at all."""

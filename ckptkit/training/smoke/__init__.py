"""Train a tiny model in a short run, and check it and all that is made of it."""

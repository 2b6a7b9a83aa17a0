"""Compare checkpoints: what is in one and not in the other, and by how much they differ."""

"""Compare checkpoints: entries that only one of them has, and how far the others differ."""

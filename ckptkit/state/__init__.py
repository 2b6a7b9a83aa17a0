"""The steps of a conversion: which entries of a checkpoint are written, and how they change."""

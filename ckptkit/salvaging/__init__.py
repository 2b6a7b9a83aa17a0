"""Salvage a damaged checkpoint: tell what of it is whole, repair what has copies, and account for the rest."""

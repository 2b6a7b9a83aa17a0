"""Salvage a damaged checkpoint: tell what of it is whole, mend what has copies, and account for the rest."""

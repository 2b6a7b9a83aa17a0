"""Salvage a damaged checkpoint: find the damage, use copies where there are any, and account for the rest."""

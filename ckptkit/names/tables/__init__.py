"""The tables of names: one file for each family."""

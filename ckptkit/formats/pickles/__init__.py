"""Pickles, read and written without running them."""

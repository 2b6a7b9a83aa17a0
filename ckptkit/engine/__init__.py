"""Carry out plans: threads visit blocks of bounded size, read and check them, and copy, combine, compare or count."""

"""Estimate the memory and the disk that a training takes."""

"""Estimate the GPU memory and the disk space that a training needs."""

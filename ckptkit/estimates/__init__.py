"""Estimating: what a training will take."""

"""Smoke: a short run, and all that must be true of it and of what comes of it."""

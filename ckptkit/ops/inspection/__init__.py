"""Inspecting: what a checkpoint or a run is, and what its numbers look like."""

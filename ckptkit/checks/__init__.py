"""Examine a checkpoint or compare two: verify, diff, inspect, stats."""

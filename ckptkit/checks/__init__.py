"""Look at a checkpoint and compare two: verify, diff, inspect, stats."""

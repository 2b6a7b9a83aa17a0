"""Runs on S3: prune and pin checkpoints, watch a run, abort uploads, and write the small files of a run."""

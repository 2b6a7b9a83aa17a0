"""Prove that a training script resumes: run its command, compare and change the checkpoints that it saves."""

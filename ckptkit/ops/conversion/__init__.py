"""Converting: every command that writes a checkpoint."""

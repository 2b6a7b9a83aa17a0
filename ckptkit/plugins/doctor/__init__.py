"""Find what will break when a checkpoint is loaded, explain the error of a failed load, and suggest fixes."""

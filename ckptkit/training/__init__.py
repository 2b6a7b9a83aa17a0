"""Train with FSDP: a loop to read in one sitting. Meets the converters on disk only."""

"""Training: an FSDP2 loop to read in one sitting. Meets the converters on disk only."""

"""Train with FSDP: a loop to read in one sitting."""

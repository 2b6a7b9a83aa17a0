"""Say what a checkpoint is: its groups, ties and modules."""

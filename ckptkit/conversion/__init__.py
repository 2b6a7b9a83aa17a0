"""Make a checkpoint from another: consolidate, reshard, convert, average, merge, and salvage damaged ones."""

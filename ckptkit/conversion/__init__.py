"""Make another checkpoint of one: consolidate, reshard, convert, average, merge, and salvage what is damaged."""

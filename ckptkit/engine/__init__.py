"""The engine: what carries out a plan. Workers read, check, convert and write blocks, and note what they did."""

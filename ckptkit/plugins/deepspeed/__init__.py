"""Read DeepSpeed checkpoints, with and without ZeRO, and read and write universal checkpoints."""

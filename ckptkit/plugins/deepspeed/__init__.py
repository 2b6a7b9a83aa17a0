"""Read DeepSpeed's directories, ZeRO's and others, and read and write its universal checkpoints."""

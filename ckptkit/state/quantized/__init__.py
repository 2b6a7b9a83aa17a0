"""Quantized weights: low-precision numbers with scales. Recognized by names, shapes and config.json."""

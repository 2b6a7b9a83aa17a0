"""Quantize the linear layers of a model that is exported: `--quantize`."""

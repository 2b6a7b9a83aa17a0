"""Quantize the linear layers of an exported model: `--quantize`."""

"""The ways in which quantized weights are stored, a module each. `table.py` lists them."""

"""The storage schemes of quantized weights, one module each. `table.py` lists them."""

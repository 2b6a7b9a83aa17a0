"""Know tensors without any file: their elements, the place of each in its tensor, and its number."""

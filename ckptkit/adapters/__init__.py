"""Recognize adapters by tensor names and shapes: small tensors that are trained beside a frozen base model."""

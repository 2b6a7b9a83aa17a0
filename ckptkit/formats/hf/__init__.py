"""Safetensors, as Hugging Face lays them out."""

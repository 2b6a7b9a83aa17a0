"""Hold safetensors, as Hugging Face lays them out."""

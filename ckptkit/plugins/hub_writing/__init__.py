"""Write to repositories and buckets of the Hugging Face Hub."""

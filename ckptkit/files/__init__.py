"""Read and write bytes in files, local or behind a URL, whole or not at all."""

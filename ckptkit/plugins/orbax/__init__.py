"""Read the array trees that orbax saves: JSON metadata, and zarr cells that tensorstore decodes."""

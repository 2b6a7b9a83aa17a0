"""Handle the trees of arrays that orbax saves: JSON that lists them, and cells of zarr that tensorstore reads."""

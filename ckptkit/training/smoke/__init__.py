"""The smoke test: a short training of a tiny model, with checks of the run and of its conversions."""

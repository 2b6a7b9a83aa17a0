"""Save and load a training under way, for anybody's loop. Knows neither the model's code nor the data."""

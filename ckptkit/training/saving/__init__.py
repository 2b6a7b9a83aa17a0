"""Save and load a training under way, for anybody's loop."""

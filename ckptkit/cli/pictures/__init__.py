"""Draw shard maps as text for a terminal, and as SVG."""

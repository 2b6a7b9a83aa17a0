"""Draw layouts and numbers as text for a terminal, and as SVG."""

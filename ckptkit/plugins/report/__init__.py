"""Report on a run as a page."""

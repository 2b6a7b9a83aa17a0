"""Write a report on a run as an HTML page."""

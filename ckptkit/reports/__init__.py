"""Reporting: a run as a page."""

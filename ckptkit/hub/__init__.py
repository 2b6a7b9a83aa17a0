"""Sharing: to and from the Hub."""

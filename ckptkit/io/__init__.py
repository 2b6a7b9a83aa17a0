"""Bytes in and out: local files, stores, locks, checksums, and where an output appears whole or not at all."""

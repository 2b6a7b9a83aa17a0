"""Verifying: whole and undamaged, by structure, checksums and manifests."""

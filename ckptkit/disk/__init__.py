"""The disk: bytes and their checksums, in files that are made whole or not at all, whatever happens meanwhile."""

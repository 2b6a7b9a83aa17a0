"""Handle snapshots of torchsnapshot: a manifest in JSON, and files of raw bytes that it points into."""

"""What changed between two policies: written, read, checked, and applied to the older one."""

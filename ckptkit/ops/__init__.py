"""Do what the commands say: one file a verb, each returning a frozen result. None moves a byte by itself."""

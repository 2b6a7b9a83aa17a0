"""The fault matrix: bad and hostile inputs, failing system calls, crashes and fuzz, and what came of each."""

"""`millstream.toml`: its keys, and reading it."""

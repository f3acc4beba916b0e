"""`millstream.toml`: what it may say, and reading it."""

"""Records as text and files: export, import, and the formats of `wal cat`."""

"""The replication stream: read off its socket or in chunks, held, spilled, decoded in order, and handed to the log."""

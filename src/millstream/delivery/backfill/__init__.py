"""Backfills of consumers: the rows of tables as of a cursor, delivered before the log goes on."""

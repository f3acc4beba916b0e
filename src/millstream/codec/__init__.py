"""Bytes to values and back: the log's segments and frames, the replication protocol. Pure: no I/O, no clock."""

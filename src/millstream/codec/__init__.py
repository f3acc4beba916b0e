"""Bytes to values and back. Pure: no I/O, no clock.

The log's files are `log_segment` (header and footer) and `log_frame` (a commit group's part for one shard);
docs/internals/FORMAT.md describes them. `pgoutput` decodes PostgreSQL's replication messages, `line_protocol`
InfluxDB's lines. `replication_messages` has the messages between a leader and its followers, `buffered_op` the entries of
write buffers.
"""

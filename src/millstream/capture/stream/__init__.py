"""The replication stream: read off its socket or in chunks, held, spilled, decoded in order, and handed to the log.

Start at `receiver`, which reads, and `applier`, which submits what was read.
"""

"""Capture from PostgreSQL: slot and publications, streaming into the log, table copy, and the checks of `doctor`.

It reads. It writes nothing to the source except the slot, publications if they are missing and may be created, and a
heartbeat message. It appends through a `ports.LogAppender`; its durable state is in the catalog.

Start at `run`, which captures a stream until it is told to stop.
"""

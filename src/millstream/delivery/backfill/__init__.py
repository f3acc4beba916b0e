"""Backfills of consumers: the rows of tables as of a cursor, delivered before the log goes on.

`backfill_control` begins and ends a consumer's backfills, `rows` is the file of their rows, `row_writer` the
worker that fills it, and `running_backfill` delivers from it.
"""

"""Backfills of consumers: the rows of tables as of a cursor, delivered before the log goes on.

`steering` begins and ends a consumer's backfills, `rows` is the file of their rows, `writing` the worker that
fills it, and `machine` delivers from it.
"""

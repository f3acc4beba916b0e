"""A lake in a PostgreSQL database: event tables, read in order of `seq`, and tables that hold the source's rows.

One transaction there lands a batch's data for all tables, positions included. So readers see whole
transactions of the source, and landing a batch again after a crash adds nothing. Runs in executors,
as the rest of the lake does; it needs psycopg in addition to the core.
"""

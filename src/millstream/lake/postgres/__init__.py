"""A lake in a PostgreSQL database: event tables that are read in order of `seq`, and tables that hold the source's rows.

All that a batch brings for all tables is one transaction there, positions included: readers see whole transactions of the source,
and what is landed again after a crash adds nothing. Runs in executors, as the rest of the lake does; it needs psycopg beside the core.
"""

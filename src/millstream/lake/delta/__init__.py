"""Delta as a format of the lake's tables, through delta-rs: see `millstream.lake.table_format`, which it is behind.

`format` opens and creates tables and commits to them, and `log` bounds their metadata.
"""

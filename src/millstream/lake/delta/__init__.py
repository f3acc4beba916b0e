"""Delta as a format of the lake's tables, through delta-rs: see `millstream.lake.table_format`, which it is behind.

`format` opens and creates tables, `commits` has the handle that commits to them, and `log` bounds their metadata.
"""

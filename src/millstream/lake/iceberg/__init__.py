"""Iceberg as a format of the lake's tables, through pyiceberg: see `millstream.lake.table_format`, which it is behind.

`handle` opens tables and commits to them, `columns` keeps the ids of their columns, `data_files` their files' facts,
`catalog` finds them, `names` names them, and `upkeep` bounds their metadata.
"""

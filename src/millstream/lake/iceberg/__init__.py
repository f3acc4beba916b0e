"""Iceberg as a format of the lake's tables, through pyiceberg: see `millstream.lake.table_format`, which it is behind.

`format` opens and creates tables, `commits` has the handle that commits to them, `columns` keeps the ids of their columns,
`data_files` their files' facts, and `facts` Millstream's own. `catalog` finds them, `rest` bounds requests to a server, `files`
knows where they lie, `names` names them, and `maintenance` bounds their metadata.
"""

"""The log on disk: its segments are appended to, recovered, read, retained and inspected.

`writer` appends (one process per shard), and `reader` reads (any process, from the folder alone).
`recover` decides at start what the log holds. `retain` drops old segments. `inspect` shows and
verifies files, including damaged ones. The byte formats are in `millstream.codec`.
"""

"""The log on disk: its segments are appended to, recovered, read, retained and inspected.

Start at `reader` (any process reads, from the folder alone) and at `writing.writer` (one process per shard appends).
`writing.recover` decides at start what the log holds. `segment_deletion` drops old segments. `mending.inspect` shows
and verifies files, including damaged ones. `replica` is a log on another machine. The byte formats are in
`millstream.codec`.
"""

"""The log on disk: segments appended to, recovered, read, retained and inspected.

`writer` appends (one process a shard), `reader` reads (any process, from the folder alone), `recover` decides at start
what the log holds, `retain` drops old segments, `inspect` shows and verifies files, also damaged ones. The bytes
themselves are `millstream.codec`'s.
"""

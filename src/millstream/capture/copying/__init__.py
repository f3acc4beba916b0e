"""Copying a table's existing rows next to the stream of its changes: chunks, threads, pace, and repeated copies.

Start at `table_copies`: it decides which tables are copied and when a chunk enters the log. `chunk_reader` reads
the chunks of a table with a key, `whole_table_reads` reads a table without one whole. `chunk_sizes` decides how much is
read at once, and `throttle` how soon again.
`row_repair` reads single rows again, for `diff --repair`. Whether a chunk that was read may enter the log, or has to wait
for changes of the same keys, `protocol.copy_conflicts` decides.
"""

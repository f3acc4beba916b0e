"""Write buffers: they hold operations between their writers and the log that takes them.

Kafka, Redis streams and memory; the buffer of log files lives with the log (`wal.log_buffer`). All pass
`millstream.testing.WriteBufferConformance`.
"""

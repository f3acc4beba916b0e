"""Write buffers: they hold operations between their writers and the log that takes them.

Kafka and Redis streams; the buffer of log files lives with the log (`wal.log_buffer`), the one in memory is a test
double (`testing.memory_buffer`). `writers.write_buffers` opens them by kind. All pass
`millstream.testing.WriteBufferConformance`.
"""

"""Write buffers: what holds operations between those who write them and those who take them into a log.

Kafka, Redis streams and memory; one of log files lives with the log (`wal.buffer`). All pass `millstream.testing.WriteBufferConformance`.
"""

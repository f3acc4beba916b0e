"""The processes that write a home's streams: the owner, an application that appends, or one writer among several.

Start at `owner`. `stream_writer` opens a stream's writer, `leased_writer` is one of several. `home_appender` and
`home_consumers` find the process to call. `stream_routing`, `stream_sinks` and `write_buffers` open what the
configuration names for a stream.
"""

"""Application writes: callers' rows become columns of the log's types, under schemas that grow within the rules.

Start at `appender`, which all ways in call. `python_rows`, `json_rows`, `line_protocol` and
`arrow_stream_decoding` read the forms of rows. `schema_on_write` extends a table's schema, and `fit_to_schema` casts
the rows' values to it, or refuses them. `append_server` and `append_client` are the two ends of the writer's socket.
"""

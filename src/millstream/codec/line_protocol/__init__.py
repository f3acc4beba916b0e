"""InfluxDB's line protocol: lines of measurements, tags, fields and times.

`grammar` has the rules, `line_parser` parses lines into columns. After a change in `_values`, `_names`,
`_floats` or `codec.little_endian_words`, also change `_line_scan` and `_arrange`: numba caches machine code by the
file of the called function, and the cached code includes the functions that it calls.
"""

"""InfluxDB's line protocol: lines of measurements, tags, fields and times.

`grammar` has the rules, `columns_of_lines` makes columns of lines. After a change in `_values`, `_names`,
`_floats` or `codec.little_endian_words`, also change `_line_scan` and `_arrange`: numba caches machine code by the
file of the called function, and the cached code includes the functions that it calls.
"""

"""InfluxDB's line protocol: lines of measurements, tags, fields and times. `grammar` has the rules, `vectorised` makes columns of lines.

Whoever changes `_values`, `_names`, `_floats` or `codec.words` touches `_scan` and `_arrange` too: numba keeps machine code by the file of the function that was called,
with all that it calls in it.
"""

"""The network services of a home: HTTP and Arrow Flight, with access, limits and metrics.

Start at `server`, which is `serve`, and `application`, the paths of HTTP. `row_writes` and `line_writes` take
rows, `http_reads` answers reads, `tail` sends records as they come, and `flight` is Arrow Flight. `access` decides
who may call, and `request_bodies` bounds what the bodies take.
"""

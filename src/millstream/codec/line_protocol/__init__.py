"""InfluxDB's line protocol: lines of measurements, tags, fields and times. `grammar` has the rules, `vectorised` makes columns of lines."""

"""A home put to work: the local client, its status and alerts, the pipelines, and requests to its tables.

Start at `open_home`, which is `millstream.open`. `status` collects a home's state, which the command line, the
console and `alerts` show and judge. `pipelines` is the process that lands streams in the lake. `table_requests`
asks the owner for copies, retries and erasures of tables. Heavy parts are imported where they are used.
"""

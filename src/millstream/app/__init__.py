"""A home put to work: the local client, its status and checks, the pipelines, and an operator's requests.

Start at `open_home`, which is `millstream.open`. `status` collects a home's state, which `doctor`, the command
line, the console and `alerts` show and judge. `pipelines` is the process that lands streams in the lake.
`rebuild`, `fold` and `table_requests` carry out what an operator asks for. Heavy parts are imported where they
are used.
"""

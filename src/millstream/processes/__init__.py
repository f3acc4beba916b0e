"""The processes of a home: supervision, roles, the control socket, and logs.

Start at `run`, all parts under one `supervisor`; `child_process` is a part's side of it. `role_locks` keeps each
role to one process, and `control_socket` asks a living process for what only it knows.
"""

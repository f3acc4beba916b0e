"""The processes of a home: supervision, locks, the control socket, and logs."""

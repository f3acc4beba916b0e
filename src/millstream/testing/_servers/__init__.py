"""Servers of the test kit: the origin of their programs, their ports, and the end of their processes."""

"""Servers of the test kit: where their programs come from, their ports, and how their processes end."""

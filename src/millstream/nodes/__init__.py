"""A home as one of several nodes: its logs shipped from it and to it, and who leads."""

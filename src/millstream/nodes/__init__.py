"""A home as one of several nodes: log shipping in both directions, and who leads."""

"""Workloads for sources: one that uses every type and statement, and a shop's."""

"""Leaf partitions whose changes come under their own OIDs: which table each belongs to, and when one is gone.

A publication without `publish_via_partition_root` sends a partitioned table's changes as those of its leaves. Each
record then names its leaf, so that a leaf which is dropped, detached or truncated costs one record `x`, and no copy of
the table.
"""

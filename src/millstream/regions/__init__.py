"""Regions that write independently: merged tables, reconciliation, and what retention keeps for them.

Start at `merged_table`, which reads all regions' logs as one table. `lake_folds` folds it into the lake,
`reconcile` is the command, and `region_retention` holds the log for records that weren't merged yet. The merging
rules are in `millstream.crdt`; `millstream.nodes.region_copies` says which logs of other regions come here.
"""

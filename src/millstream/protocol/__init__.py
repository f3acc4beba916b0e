"""State machines: no I/O, no clock, no randomness; effects are returned as values.

`sequencer` gives out numbers, `replication` decides which node leads and what is shipped, `delivery` what a
consumer receives, `retention` which segment goes, `copy_conflicts` when a copied chunk may enter the log, and
`deduplication` answers repeated writes. Their packages open with the premises and the tables of states.
"""

"""Values: positions, ids, schemas, records and operations. Pure: no I/O, no clock, no randomness.

Start at `positions` (LSNs, offsets, numbers and tokens), `records` (the columns that Millstream adds) and
`operations` (the writes of one transaction or request). `pgtypes` and `exact_values` map PostgreSQL's types and texts
to the log's.
"""

"""What merges whatever order it comes in: the hybrid clock, counters, registers, sets, signals, and the reconciliation of regions.

Every kind of state is a join semilattice: `join` is commutative, associative and idempotent, and its result holds what either side held.
So deliveries may come in any order, twice, or many at once, and whoever has seen the same ones has the same state. `crdt.lattice` is the
shape that all kinds have; `crdt.tables` merges whole tables of them, column by column.
"""

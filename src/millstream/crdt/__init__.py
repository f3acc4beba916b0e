"""States that merge in any order: hybrid clock, counters, registers, sets, signals, reconciliation of regions.

Every kind of state is a join semilattice: `join` is commutative, associative and idempotent, and its result holds
what either side held. So deliveries may come in any order, twice, or many at once; processes that have seen the same
ones have the same state. `crdt.lattice` is the protocol of all kinds; `crdt.tables` merges whole tables of them,
column by column.
"""

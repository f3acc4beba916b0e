"""Values: positions, ids, schemas, records and operations. Pure: no I/O, no clock, no randomness."""

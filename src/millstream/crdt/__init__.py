"""What merges whatever order it comes in: the hybrid clock, counters, registers, sets, signals, and the reconciliation of regions."""

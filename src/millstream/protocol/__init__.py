"""State machines: no I/O, no clock, no randomness; effects are returned as values."""

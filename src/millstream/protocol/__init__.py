"""State machines: no I/O, no clock, no randomness; what is to be done comes back as a value."""

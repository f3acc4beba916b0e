"""Inspection and repair of a log that may be damaged; repair is the only way past damage.

`inspect` reports, `plan` says what a repair would lose, and `repair` performs it.
"""

"""`diff`: compares the lake with its source, by key and value, while both move; and has differing rows read again.

Start at `compare`. `position` waits for the point at which both sides hold the same, `source` and `lake` compute
sums and rows, `columns` makes their texts comparable, and `repair` has capture read rows again.
"""

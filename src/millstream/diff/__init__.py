"""`diff`: compares the lake with its source, by key and value, while both move; and has differing rows read again.

Start at `compare`. `position` waits for the point at which both sides hold the same, `source_side` and
`lake_side` compute sums and rows, `column_texts` makes their texts comparable, and `asked_repairs` has capture read rows
again.
"""

"""Tables that are folded from history: the rows as they are (`current`), and their versions (`scd2`).

Start at `current_table`, which writes and commits what `current_rules` decides; `scd2_table` and `scd2_rules` are their twins.
"""

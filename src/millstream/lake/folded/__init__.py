"""Tables that are folded from history: the rows as they are (`current`), and their versions (`scd2`)."""

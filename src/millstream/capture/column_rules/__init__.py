"""Rules of columns in a stream's tables: bound to columns, put to use in a session, and the rows from before a rule.

Start at `binding`: it tells which column of a row is left out, hashed or redacted. `apply_to_changes` then applies that
to changes, `apply_to_copies` to copied rows. `session_rules` checks the rules and gives a session what applies them.
"""

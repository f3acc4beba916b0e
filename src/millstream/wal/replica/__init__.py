"""A log on another machine: the leader ships bytes, the follower verifies and keeps them; roles can change.

`ship_source` reads a leader's log, and `replica_log` is the follower's, whose readers it shows what
`follower_marks` allows. `set_aside` cuts an old leader's log back, and `prepare_promotion` makes a follower's
log one that a writer opens.
"""

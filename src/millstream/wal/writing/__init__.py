"""The write path of a log: the queue, commit groups, segments and marks, and recovery, which comes first.

Start at `writer`, the queue and its thread. `group_commit` makes a group durable in `segment`s,
`deduplicated_commits` leaves out writes that the log has, and `awaiting_acks` answers the callers. `recover` finds
what a crash left.
"""

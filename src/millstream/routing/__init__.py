"""Routing: rules that choose the shard, the partition and the sinks of each row of an application's write.

Start at `router`. `rules` are its rules, `ring` maps hashes of keys to shards, `partitions` names partitions,
and `dispatch` writes to the log and to sinks.
"""

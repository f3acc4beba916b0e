"""Routing: rules that choose the shard, the partition and the sinks of each row of an application's write."""

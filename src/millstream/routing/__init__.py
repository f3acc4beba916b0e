"""Routing: rules that say which shard, which partition and which sink takes each row of an application's write."""

"""A stream's log on other machines: the shipper at its leader, the follower, and the transports between them.

Start at `shipper` and `follower`, which perform what `millstream.protocol.replication` decides; `archiver` ships
to an object store. The transports are `flight` and `object_store`.
"""

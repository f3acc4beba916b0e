"""A home as one of several nodes: log shipping in both directions, and who leads.

`log_shipping` is the leader's part of `serve`, `follower_process` is `millstream follow`. `promote`, `restore`
and `replicas` perform the commands of those names, `object_stores` performs `scrub`. `…_document` is state that is shipped with the log.
The rules are in `millstream.protocol.replication`, the transports in `millstream.replication`.
"""

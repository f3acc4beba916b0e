"""One log on several nodes: which node leads, what is sent, what is taken, and what is acknowledged.

Three machines, none of which does I/O, and the facts that they share:

- `Leader`: per follower, what goes next and how far it has the log; which nodes hold how much of it.
- `Follower`: what is taken from a leader, and the age of what readers see.
- `Promotion`: how a node becomes the leader, and the old one is fenced.
- `node_promises`: what a node durably notes about its part: its promise, its role, the lineage of its log.

Premises
--------
1. A log is commit groups with growing numbers. The leader appends; other nodes change a log only by taking the leader's
   bytes, in order.
2. A node keeps what it has acknowledged as durable, or it is a new node. (If a node comes back with less than it
   had, the leader notices. It counts for nothing until it has everything again.)
3. Data arrives on a link in order, whole, and as it was sent, or the link is broken: the transports' checksums
   and numbers ensure that. Links break at any moment; messages of an older link are never received on a newer one.
4. Clocks may jump. No guarantee rests on them; only the reported age of data does.

The guarantee on these premises: a group that was acknowledged at a level is in the log of every later leader that was
promoted without `--accept-loss`, unless the nodes or store that the level names are lost together with the
leader. Two nodes' logs are the same wherever both have shown something at that level.
"""

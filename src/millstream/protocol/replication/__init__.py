"""One log on several nodes: who leads, what is sent to whom, what is taken, and what is acknowledged.

Three machines and the facts that they share, none of which does anything by itself:

- `Leader`: per follower, what goes next and how far it has the log; who holds how much of it.
- `Follower`: what is taken of a leader, and how old what is shown is.
- `Promotion`: how a node becomes the leader, and the old one is fenced.
- `roles`: what a node durably knows of its part: its promise, its role, the lineage of its log.

Premises
--------
1. A log is commit groups with growing numbers. Whoever leads appends; nobody else changes a log but by taking the leader's bytes, in order.
2. A node keeps what it has said to be durable, or it is a new node. (One that comes with less than it had is noticed, and counts for nothing before it has it anew.)
3. What arrives on a link arrived in order, whole, as it was sent, or the link is broken: the transports' checksums and numbers see to that. Links
   break at any moment; an older link's words are never heard on a newer one.
4. Clocks may jump. Nothing that is promised rests on them; only how old something is said to be.

What is promised, on these: a group that was acknowledged at a level is in the log of every later leader that was promoted without `--accept-loss`,
as long as what the level names isn't lost with the leader; and two nodes' logs are the same wherever both have shown something at that level.
"""

from __future__ import annotations

from millstream.protocol.replication.backoff import Backoff
from millstream.protocol.replication.follower import Follower, Holding, Lag
from millstream.protocol.replication.leader import Leader, end_of, is_covered
from millstream.protocol.replication.levels import level_kept, promises_wanted
from millstream.protocol.replication.promotion import Promotion, Standing
from millstream.protocol.replication.roles import (
    LINEAGE,
    NOBODY,
    UNPROMISED,
    Greeting,
    Lineage,
    Promise,
    Rank,
    Reign,
    Role,
    RoleFact,
    fenced_error,
)
from millstream.protocol.replication.shipping import LinkId, ShipOptions

__all__ = [
    "LINEAGE",
    "NOBODY",
    "UNPROMISED",
    "Backoff",
    "Follower",
    "Greeting",
    "Holding",
    "Lag",
    "Leader",
    "Lineage",
    "LinkId",
    "Promise",
    "Promotion",
    "Rank",
    "Reign",
    "Role",
    "RoleFact",
    "ShipOptions",
    "Standing",
    "end_of",
    "fenced_error",
    "is_covered",
    "level_kept",
    "promises_wanted",
]

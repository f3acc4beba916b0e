"""How many nodes have to promise before a promotion loses nothing, by acknowledgement level.

A stream has n nodes, the leader among them. A group that was acknowledged at a level is still there

    | level      | it lies on                        | as long as there is      | promises that a new leader needs                  |
    |------------|-----------------------------------|--------------------------|---------------------------------------------------|
    | local      | the leader                        | the leader               | all n nodes                                       |
    | durable(k) | the leader and k followers        | any one of these k + 1   | any n - k nodes: they and any k + 1 have one in common |
    | object     | the leader and the object store   | either                   | the object store: the leader looks there for a    |
    |            |                                   |                          | later claim behind each put, before it acknowledges |

The same promises keep an old leader from acknowledging anything at that level: too few nodes are left that take
anything from it. `protocol.replication.ack_levels.Holdings` computes how far each level is reached.
"""

from __future__ import annotations

from millstream.model.replication import AckKind, AckLevel


def promises_wanted(level: AckLevel, nodes: int) -> int:
    """Return how many nodes, the candidate among them, have to promise.

    Then the candidate has what was acknowledged at that level, and nothing more is acknowledged at it.
    """
    if level.kind is AckKind.OBJECT:
        return 1
    return max(1, nodes - level.followers)


def level_kept(promises: int, nodes: int) -> AckLevel | None:
    """Return the least level at which nothing can be lost with that many promises; None if only `object` is left."""
    missing = nodes - promises
    if missing <= 0:
        return AckLevel(AckKind.LOCAL)
    return AckLevel(AckKind.DURABLE, missing) if missing < nodes else None

"""Acknowledgement levels: who has to have a group, and which nodes a promotion can't do without.

A stream has n nodes, the leader among them. What was acknowledged at a level is still there

    | level      | it lies on                        | as long as there is      | who has promised makes a new leader sure of it    |
    |------------|-----------------------------------|--------------------------|---------------------------------------------------|
    | local      | the leader                        | the leader               | all n nodes                                       |
    | durable(k) | the leader and k followers        | any one of these k + 1   | any n - k nodes: they and any k + 1 have one in common |
    | object     | the leader and the object store   | either                   | the object store: who leads looks there for a     |
    |            |                                   |                          | later claim behind each put, before it acknowledges |

The same promises keep an old leader from acknowledging anything at that level: too few are left that take anything from it. How far each level is
reached is said by `model.replication.Holdings`.
"""

from __future__ import annotations

from millstream.model.replication import AckKind, AckLevel


def promises_wanted(level: AckLevel, nodes: int) -> int:
    """How many of the nodes, the candidate among them, have to promise so that it has what was acknowledged at that level, and nothing more is."""
    if level.kind is AckKind.OBJECT:
        return 1
    return max(1, nodes - level.followers)


def level_kept(promises: int, nodes: int) -> AckLevel | None:
    """The least level at which nothing can be lost with that many promises; None where there is none but `object`."""
    missing = nodes - promises
    if missing <= 0:
        return AckLevel(AckKind.LOCAL)
    return AckLevel(AckKind.DURABLE, missing) if missing < nodes else None

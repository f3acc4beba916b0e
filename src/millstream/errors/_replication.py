"""Errors of a log on several machines: shipping it, following it, and who leads."""

from __future__ import annotations

from millstream.errors._root import MillstreamError, Retry


class ReplicationError(MillstreamError):
    """Something between a stream's leader and its followers."""

    code = "replication"
    retry = Retry.BACKOFF


class ReplicaGap(ReplicationError):
    """What came lies beyond what the follower has: it asks for what is between."""

    code = "replica_gap"
    default_hint = "Nothing: the leader sends what is missing."


class Diverged(ReplicationError):
    """The follower has other bytes than the leader at the same place. It changes nothing."""

    code = "diverged"
    retry = Retry.OPERATOR
    default_hint = "Find out which of the two is right; then set the follower's folder of the stream aside and have it built anew by `millstream follow --rebuild`."


class ShipmentUnreadable(ReplicationError):
    """What came is damaged, or of another version."""

    code = "shipment_unreadable"
    default_hint = "It is sent again. If this repeats, both sides need the same version of Millstream."


class StoreDamaged(ShipmentUnreadable):
    """An object of the object store is damaged, or isn't there, and what was asked for lies in it or behind it."""

    code = "store_damaged"
    default_hint = (
        "`millstream scrub`, at a node that still has these bytes in its log, puts the object back. Where none has: put it back from an older "
        "version or a copy of the store. What lies in front of it `millstream restore --at` brings back."
    )


class ReplicaFailed(ReplicationError):
    """The follower's disk failed: what was on its way may or may not be durable. Only opening its log anew decides."""

    code = "replica_failed"
    retry = Retry.REOPEN
    default_hint = "Nothing: the follower opens its log anew, and goes on behind what it finds. If this repeats, look after the disk."


class OtherStream(ReplicationError):
    """The follower has another stream under that name."""

    code = "other_stream"
    retry = Retry.OPERATOR
    default_hint = "Follow it in a home of its own, or move the folder data/wal/STREAM away first."


class RoleUnreadable(ReplicationError):
    """What a node has noted of its part in a stream can't be read: whom it has promised what isn't known."""

    code = "role_unreadable"
    retry = Retry.OPERATOR
    default_hint = "Have it follow anew: move its folder of the stream, and the file that is named, away, then `millstream follow --rebuild`."


class Fenced(ReplicationError):
    """Another node was promoted: this one leads no more."""

    code = "fenced"
    retry = Retry.OPERATOR
    default_hint = "Write to the node that leads now. `millstream follow` makes this one its follower; what only this one has is set aside then."


class ReadOnly(ReplicationError):
    """This node follows another one; writes go there."""

    code = "read_only"
    retry = Retry.OPERATOR
    default_hint = "Write to the leader, or make this node the leader by `millstream promote`."


class ReplicaTooStale(ReplicationError):
    """What the follower could show is older than the caller, or its configuration, allows."""

    code = "replica_too_stale"
    default_hint = "Read from the leader, or with a larger bound; `millstream replicas` tells why it lags."


class NotEnoughReplicas(ReplicationError):
    """Too few followers, or no object store, have confirmed a write in time: it is durable here, and may be nowhere else."""

    code = "not_enough_replicas"
    default_hint = (
        "Send it again under the same session or key: it is taken once. `millstream replicas` tells who doesn't answer."
    )


class AckLevelUnavailable(ReplicationError):
    """Nobody can say whether what is written is held as an acknowledgement level asks, or it never will be: nothing was written."""

    code = "ack_level_unavailable"
    retry = Retry.OPERATOR
    default_hint = 'Append with acks = "local", to a stream that is kept in a log and has one writer.'


class NotCaughtUp(ReplicationError):
    """The node that is to be promoted lacks records that were acknowledged elsewhere."""

    code = "not_caught_up"
    retry = Retry.OPERATOR
    default_hint = "Let it catch up, or promote a node that has more; --accept-loss promotes it and says what is lost."


class PromotionLost(ReplicationError):
    """Another node is being promoted, or was at the same time."""

    code = "promotion_lost"
    retry = Retry.OPERATOR
    default_hint = "Have this node follow the one that won: `millstream follow`."


class TwoLeaders(ReplicationError):
    """Two nodes lead a stream, and neither was promoted: one of them was never told whom to follow, so that each has a log of its own."""

    code = "two_leaders"
    retry = Retry.OPERATOR
    default_hint = (
        "Decide whose log it is to be. On the other node, stop `millstream run`, move data/wal/STREAM away (what it has isn't in the first one's log), then "
        "`millstream follow` the first."
    )


class StoreUnusable(ReplicationError):
    """The object store can't do what shipping needs of it."""

    code = "store_unusable"
    retry = Retry.OPERATOR
    default_hint = "It must refuse a conditional write (If-None-Match) of an object that exists: use a store that does, such as S3, GCS, Azure or R2."


class StoreUnavailable(ReplicationError):
    """The object store doesn't answer."""

    code = "store_unavailable"
    default_hint = (
        "Check its address and credentials. A process that runs tries again by itself; a command can be repeated."
    )


class LinkLost(ReplicationError):
    """The connection between a leader and a follower broke."""

    code = "link_lost"
    default_hint = (
        "Nothing, where `millstream run` is there: it is made anew, and goes on where it was. A command can be repeated, once the other node "
        "serves at the address that [replication] has for it."
    )


class UnknownNode(ReplicationError):
    """There is no such node."""

    code = "unknown_node"
    retry = Retry.OPERATOR
    default_hint = "`millstream replicas` lists them; [replication] nodes in millstream.toml names them."


class NodeNameTaken(ReplicationError):
    """Another home goes by this node's name: it follows already, or it was promised what this one asks for."""

    code = "node_name_taken"
    default_hint = (
        "Each home needs a name of its own in [replication] node, and all of them in [replication.nodes]. A home that was copied from another "
        "node's gets its own name there, then `millstream follow --rebuild`. One that was moved is taken once the other one has ended."
    )


class ClockSkew(ReplicationError):
    """Another node's clock runs further ahead of this one's than is allowed: what it says would win over everything that is written here meanwhile."""

    code = "clock_skew"
    retry = Retry.OPERATOR
    default_hint = "Set that node's clock, or this one's, right (NTP): nothing was taken from it meanwhile."


class MergeStateUnreadable(ReplicationError):
    """The bytes of a merged state are damaged, or of another version."""

    code = "merge_state_unreadable"
    retry = Retry.OPERATOR
    default_hint = "Delete it: it is made anew from the logs of the regions."


class MergeUnsuitable(ReplicationError):
    """A table or a column can't merge as the configuration says."""

    code = "merge_unsuitable"
    retry = Retry.OPERATOR
    exit_code = 2
    default_hint = "Mend [streams.S.merge] in millstream.toml: counters are for numbers, sets for lists, hide for booleans, lww for anything."


class LostTailMerged(ReplicationError):
    """What was merged holds records that a region has lost since, and retention has dropped what it would be made of without them."""

    code = "lost_tail_merged"
    retry = Retry.OPERATOR
    default_hint = "Move what was kept of the table (data/regions) away, and run `millstream reconcile`: it is made of what the logs have left."


class OtherRegion(ReplicationError):
    """A log is another region's than its folder, or the configuration, says."""

    code = "other_region"
    retry = Retry.OPERATOR
    default_hint = "The log of region N of a stream lies in data/wal/STREAM@N, a home's own in data/wal/STREAM: `region` in [streams.STREAM] says which region it is."

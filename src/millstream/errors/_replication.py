"""Errors of a log on several machines: shipping it, following it, and which node leads."""

from __future__ import annotations

from millstream.errors._root import MillstreamError, Retry


class ReplicationError(MillstreamError):
    """An error between a stream's leader and its followers."""

    code = "replication"
    retry = Retry.BACKOFF


class ReplicaGap(ReplicationError):
    """A shipment lies beyond what the follower has; the follower asks for the part between."""

    code = "replica_gap"
    default_hint = "Nothing: the leader sends what is missing."


class Diverged(ReplicationError):
    """The follower has other bytes than the leader at the same position. It changes nothing."""

    code = "diverged"
    retry = Retry.OPERATOR
    default_hint = "Find out which of the two is right; then set the follower's folder of the stream aside and have it built anew by `millstream follow --rebuild`."


class ShipmentUnreadable(ReplicationError):
    """A shipment is damaged, or of another version."""

    code = "shipment_unreadable"
    default_hint = "It is sent again. If this repeats, both sides need the same version of Millstream."


class StoreDamaged(ShipmentUnreadable):
    """An object of the object store is damaged or missing, and the requested records lie in it or behind it."""

    code = "store_damaged"
    default_hint = (
        "`millstream scrub`, at a node that still has these bytes in its log, puts the object back. Where none has: put it back from an older "
        "version or a copy of the store. What lies in front of it `millstream restore --at` brings back."
    )


class ReplicaFailed(ReplicationError):
    """The follower's disk failed: the shipment in flight may or may not be durable. Only reopening its log decides."""

    code = "replica_failed"
    retry = Retry.REOPEN
    default_hint = "Nothing: the follower opens its log anew, and goes on behind what it finds. If this repeats, look after the disk."


class OtherStream(ReplicationError):
    """The follower has another stream under that name."""

    code = "other_stream"
    retry = Retry.OPERATOR
    default_hint = "Follow it in a home of its own, or move the folder data/wal/STREAM away first."


class RoleUnreadable(ReplicationError):
    """A node's record of its role in a stream is unreadable, so its promise is unknown."""

    code = "role_unreadable"
    retry = Retry.OPERATOR
    default_hint = "Have it follow anew: move its folder of the stream, and the file that is named, away, then `millstream follow --rebuild`."


class Fenced(ReplicationError):
    """Another node was promoted: this node is no longer the leader."""

    code = "fenced"
    retry = Retry.OPERATOR
    default_hint = "Write to the node that leads now. `millstream follow` makes this one its follower; what only this one has is set aside then."


class ReadOnly(ReplicationError):
    """This node follows another one; writes go to the leader."""

    code = "read_only"
    retry = Retry.OPERATOR
    default_hint = "Write to the leader, or make this node the leader by `millstream promote`."


class ReplicaTooStale(ReplicationError):
    """The follower's data is older than the caller, or its configuration, allows."""

    code = "replica_too_stale"
    default_hint = "Read from the leader, or with a larger bound; `millstream replicas` tells why it lags."


class NotEnoughReplicas(ReplicationError):
    """Too few followers, or no object store, confirmed a write in time. It is durable here, and may be nowhere else."""

    code = "not_enough_replicas"
    default_hint = (
        "Send it again under the same session or key: it is taken once. `millstream replicas` tells who doesn't answer."
    )


class AckLevelUnavailable(ReplicationError):
    """The requested acknowledgement level can't be met or checked here; nothing was written."""

    code = "ack_level_unavailable"
    retry = Retry.OPERATOR
    default_hint = 'Append with acks = "local", to a stream that is kept in a log and has one writer.'


class NotCaughtUp(ReplicationError):
    """The node to be promoted lacks records that were acknowledged elsewhere."""

    code = "not_caught_up"
    retry = Retry.OPERATOR
    default_hint = "Let it catch up, or promote a node that has more; --accept-loss promotes it and says what is lost."


class PromotionLost(ReplicationError):
    """Another node is being promoted, or was at the same time."""

    code = "promotion_lost"
    retry = Retry.OPERATOR
    default_hint = "Have this node follow the one that won: `millstream follow`."


class TwoLeaders(ReplicationError):
    """Two nodes lead a stream, and neither was promoted.

    Each has a log of its own, because one was never configured to follow.
    """

    code = "two_leaders"
    retry = Retry.OPERATOR
    default_hint = (
        "Decide whose log it is to be. On the other node, stop `millstream run`, move data/wal/STREAM away (what it has isn't in the first one's log), then "
        "`millstream follow` the first."
    )


class StoreUnusable(ReplicationError):
    """The object store lacks a capability that shipping needs."""

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
    """Another home uses this node's name: it already follows, or holds the promise that this one asks for."""

    code = "node_name_taken"
    default_hint = (
        "Each home needs a name of its own in [replication] node, and all of them in [replication.nodes]. A home that was copied from another "
        "node's gets its own name there, then `millstream follow --rebuild`. One that was moved is taken once the other one has ended."
    )


class ClockSkew(ReplicationError):
    """Another node's clock is further ahead of this node's than is allowed.

    Its changes would win over everything written here in that span.
    """

    code = "clock_skew"
    retry = Retry.OPERATOR
    default_hint = "Set that node's clock, or this one's, right (NTP): nothing was taken from it meanwhile."


class MergeStateUnreadable(ReplicationError):
    """The bytes of a merged state are damaged, or of another version."""

    code = "merge_state_unreadable"
    retry = Retry.OPERATOR
    default_hint = "Delete it: it is made anew from the logs of the regions."


class MergeUnsuitable(ReplicationError):
    """A table or a column can't merge as configured."""

    code = "merge_unsuitable"
    retry = Retry.OPERATOR
    exit_code = 2
    default_hint = "Mend [streams.S.merge] in millstream.toml: counters are for numbers, sets for lists, hide for booleans, lww for anything."


class LostTailMerged(ReplicationError):
    """A merged state holds records that a region has since lost.

    Retention has dropped the records to rebuild the state without them.
    """

    code = "lost_tail_merged"
    retry = Retry.OPERATOR
    default_hint = "Move what was kept of the table (data/regions) away, and run `millstream reconcile`: it is made of what the logs have left."


class OtherRegion(ReplicationError):
    """A log belongs to another region than its folder, or the configuration, names."""

    code = "other_region"
    retry = Retry.OPERATOR
    default_hint = "The log of region N of a stream lies in data/wal/STREAM@N, a home's own in data/wal/STREAM: `region` in [streams.STREAM] says which region it is."

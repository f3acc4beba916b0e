"""Errors of a log on several machines: shipping it, following it, and which node leads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from millstream.errors._root import Code, MillstreamError, Retry


class ReplicationError(MillstreamError):
    """An error between a stream's leader and its followers."""

    code = "replication"
    retry = Retry.BACKOFF
    codes: ClassVar[Mapping[str, Code]] = {
        "replica_failed": Code(
            "The follower's disk failed: the shipment in flight may or may not be durable. The follower opens its"
            " log again and continues after its valid end.",
            Retry.REOPEN,
            "Check the follower's disk if this repeats.",
        ),
        "ack_level_unavailable": Code(
            "The requested acknowledgement level can't be met or checked here; nothing was written.",
            Retry.OPERATOR,
            'Append with acks = "local", to a stream with its own log and one writer.',
        ),
        "not_caught_up": Code(
            "The node to be promoted lacks records that were acknowledged elsewhere.",
            Retry.OPERATOR,
            "Let the node catch up, promote a node with more records, or run `millstream promote --accept-loss`, "
            "which prints the loss.",
        ),
        "two_leaders": Code(
            "Two nodes lead a stream, and neither was promoted: each has its own log, because one was never "
            "configured to follow.",
            Retry.OPERATOR,
            "Choose the leader; on the other node, stop `millstream run`, move data/wal/STREAM away (its records "
            "aren't in the leader's log), then run `millstream follow`.",
        ),
        "unknown_node": Code(
            "There is no such node.",
            Retry.OPERATOR,
            "Run `millstream replicas` to list the nodes, or add this one to [replication] nodes in millstream.toml.",
        ),
        "merge_unsuitable": Code(
            "A table or a column can't merge as configured.",
            Retry.OPERATOR,
            "Correct [streams.S.merge] in millstream.toml: counters are for numbers, sets for lists, hide for "
            "booleans, lww for any type.",
            exit_code=2,
        ),
    }


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
    codes: ClassVar[Mapping[str, Code]] = {
        "store_damaged": Code(
            "An object of the object store is damaged or missing, and the requested records are in it or after it.",
            Retry.BACKOFF,
            "Run `millstream scrub` at a node that still has these bytes in its log. If no node has, restore the "
            "object from an older version or a copy of the store, or run `millstream restore --at` for the "
            "records before it.",
        ),
    }


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


class PromotionLost(ReplicationError):
    """Another node is being promoted, or was at the same time."""

    code = "promotion_lost"
    retry = Retry.OPERATOR
    default_hint = "Have this node follow the one that won: `millstream follow`."


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

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
        "clock_skew": Code(
            "Another node's clock is too far ahead of this node's; this node's clock didn't follow it. Details: node, "
            "ahead_s.",
            Retry.OPERATOR,
            "Correct the clock of that node or of this one (NTP).",
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
            exit_code=2,
        ),
        "merge_unsuitable": Code(
            "A table or a column can't merge as configured.",
            Retry.OPERATOR,
            "Correct [streams.S.merge] in millstream.toml: counters are for numbers, sets for lists, hide for "
            "booleans, lww for any type.",
            exit_code=2,
        ),
        "promotion_lost": Code(
            "Another node is being promoted, or was at the same time.",
            Retry.OPERATOR,
            "Run `millstream follow` to make this node follow the promoted one.",
        ),
        "replica_too_stale": Code(
            "The follower's data is older than the caller, or its configuration, allows.",
            Retry.BACKOFF,
            "Read from the leader, allow a higher staleness, or wait for the regions that are behind; `millstream replicas` shows the lag.",
        ),
        "other_region": Code(
            "A log belongs to another region than its folder, or the configuration, names.",
            Retry.OPERATOR,
            "Correct `region` in [streams.STREAM], or move the log to its folder: data/wal/STREAM@N for region N, data/wal/STREAM for the home's own.",
        ),
        "lost_tail_merged": Code(
            "A merged state holds records that a region has since lost. Retention has dropped the records to rebuild the state without them.",
            Retry.OPERATOR,
            "Move the table's merged state (in data/regions) away, and run `millstream reconcile` to build it from the remaining logs.",
        ),
        "other_stream": Code(
            "Another node has another stream under that name.",
            Retry.OPERATOR,
            "Follow the stream in another home, or move the folder data/wal/STREAM away first.",
        ),
    }


class ReplicaGap(ReplicationError):
    """A shipment lies beyond what the follower has; the follower asks for the part between."""

    code = "replica_gap"
    default_hint = "Wait: the leader sends the missing part."


class Diverged(ReplicationError):
    """The follower has other bytes than the leader at the same position. It changes nothing."""

    code = "diverged"
    retry = Retry.OPERATOR
    default_hint = (
        "Find out which of the two logs is right; then build the follower's copy again with `millstream "
        "follow --rebuild`."
    )


class ShipmentUnreadable(ReplicationError):
    """A shipment is damaged, or of another version."""

    code = "shipment_unreadable"
    default_hint = (
        "Run the same version of Millstream on both sides if this repeats; the leader sends the shipment again."
    )
    codes: ClassVar[Mapping[str, Code]] = {
        "store_damaged": Code(
            "An object of the object store is damaged or missing, and the requested records are in it or after it.",
            Retry.BACKOFF,
            "Run `millstream scrub` at a node that still has these bytes in its log. If no node has, restore the "
            "object from an older version or a copy of the store, or run `millstream restore --at` for the "
            "records before it.",
        ),
    }


class RoleUnreadable(ReplicationError):
    """A node's record of its role in a stream is unreadable, so its promise is unknown."""

    code = "role_unreadable"
    retry = Retry.OPERATOR
    default_hint = (
        "Move the node's folder of the stream and the named file away, then run `millstream follow --rebuild`."
    )


class Fenced(ReplicationError):
    """Another node was promoted: this node is no longer the leader."""

    code = "fenced"
    retry = Retry.OPERATOR
    default_hint = (
        "Write to the current leader, or run `millstream follow` here, which sets aside the records that only"
        " this node has."
    )


class ReadOnly(ReplicationError):
    """This node follows another one; writes go to the leader."""

    code = "read_only"
    retry = Retry.OPERATOR
    default_hint = "Write to the leader, or make this node the leader with `millstream promote`."


class NotEnoughReplicas(ReplicationError):
    """Too few followers, or no object store, confirmed a write in time. It is durable here, and may be nowhere else."""

    code = "not_enough_replicas"
    default_hint = (
        "Send the write again under the same session or key, so that it is appended once; `millstream "
        "replicas` shows which nodes don't answer."
    )


class StoreUnavailable(ReplicationError):
    """The object store doesn't answer."""

    code = "store_unavailable"
    default_hint = "Check the store's address and credentials, and repeat the command; a running process retries."
    codes: ClassVar[Mapping[str, Code]] = {
        "store_unusable": Code(
            "The object store lacks a capability that shipping needs.",
            Retry.OPERATOR,
            "Use a store that rejects a conditional write (If-None-Match) to an existing object, such as S3, GCS, Azure or R2.",
        ),
    }


class LinkLost(ReplicationError):
    """The connection between a leader and a follower broke."""

    code = "link_lost"
    default_hint = (
        "Check that the other node serves at its address in [replication], and repeat the command; "
        "`millstream run` reconnects."
    )


class NodeNameTaken(ReplicationError):
    """Another home uses this node's name: it already follows, or holds the promise that this one asks for."""

    code = "node_name_taken"
    default_hint = (
        "Give each home its own name in [replication] node and [replication.nodes]; run `millstream follow "
        "--rebuild` in a home that was copied, or stop the old home if it was moved."
    )


class MergeStateUnreadable(ReplicationError):
    """The bytes of a merged state are damaged, or of another version."""

    code = "merge_state_unreadable"
    retry = Retry.OPERATOR
    default_hint = "Delete the file: it is built again from the logs of the regions."

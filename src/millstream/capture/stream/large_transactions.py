"""Large transactions on their way into spill files: those that the source streams in blocks, and those too large here.

The source sends a transaction that exceeds its own memory (`logical_decoding_work_mem`) while it runs, in blocks between
other transactions, and may abort parts of it. A transaction that comes whole, but exceeds the receiver's memory,
goes into a file from then on. Both become one item when they commit.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from millstream.capture.stream import message_kinds as kinds
from millstream.capture.stream.frames import Block
from millstream.capture.stream.spill_files import SpillFile, SpillFolder
from millstream.codec.pgoutput import MessageRun, Relation, StreamCommit, Type, parse_message
from millstream.codec.pgoutput.rare_messages import POSTGRES_EPOCH_US
from millstream.errors import ProtocolViolation
from millstream.model.positions import Lsn

COMMIT_FIELDS: Final = struct.Struct(">BQQq")
"""A Commit without its kind: flags, the commit's LSN, the transaction's end, its time."""
_PAIR: Final = struct.Struct(">II")


@dataclass(frozen=True, slots=True)
class StreamedRelation:
    """A Relation or Type message inside a block of the streamed transaction `xid`."""

    xid: int
    message: Relation | Type


@dataclass(frozen=True, slots=True)
class StreamedAbort:
    """The streamed transaction `xid`, or a subtransaction of it, rolled back, or is sent again from its beginning."""

    xid: int


@dataclass(frozen=True, slots=True)
class Spilled:
    """A transaction that lies in a spill file has committed.

    `streamed`: its messages have xids, and those of `aborted` were rolled back. Otherwise it came whole, and the file
    has the messages between its Begin and its Commit.
    """

    commit: StreamCommit
    file: SpillFile
    aborted: frozenset[int]
    streamed: bool


LargeItem: TypeAlias = StreamedRelation | StreamedAbort | Spilled


@dataclass(slots=True)
class _Streamed:
    """A streamed transaction that is still open."""

    file: SpillFile
    aborted: set[int] = field(default_factory=set)


class LargeTransactions:
    """The open large transactions of one connection. One thread uses them."""

    def __init__(self, spill: SpillFolder, put: Callable[[LargeItem], None], *, memory_bytes_max: int) -> None:
        self._spill = spill
        self._memory_bytes_max = memory_bytes_max
        self._put = put
        self._streamed: dict[int, _Streamed] = {}
        self._block: _Streamed | None = None
        """The transaction whose block is being received."""
        self._block_xid = 0
        self._whole: SpillFile | None = None
        """The file of the transaction that comes in one piece."""
        self._whole_xid = 0

    @property
    def is_in_block(self) -> bool:
        """Whether the next messages belong to a streamed block."""
        return self._block is not None

    @property
    def is_in_whole(self) -> bool:
        """Whether the next messages belong to a transaction that comes in one piece."""
        return self._whole is not None

    def append(self, block: Block, marks: kinds.Marks, at: int) -> int:
        """Add the messages from `at` on to the open transaction's file; return the index of the first other message."""
        if self._block is not None:
            file, mark = self._block.file, kinds.NOT_STREAMED
        else:
            assert self._whole is not None, "a large transaction is being received"
            file, mark = self._whole, kinds.NOT_WHOLE
        end = kinds.next_marked(marks, mark, at)
        file.append(block.between(at, end))
        return end

    def on_other(self, block: Block, at: int) -> Lsn | None:
        """Handle the message at which `append` ended, which is no keepalive. Return the transaction's end if the message ends it.

        Raises:
            ProtocolViolation: the message can't come there.
        """
        if self._block is None:
            return self._end_whole(block.messages[at])
        if block.kinds[at] == kinds.STREAM_STOP:
            self._block = None
        else:
            message = parse_message(block.messages[at], streamed=True)
            assert isinstance(message, Relation | Type)
            self._put(StreamedRelation(self._block_xid, message))
            self._block.file.append(block.between(at, at + 1))
        return None

    def on_streamed(self, message: bytes) -> Lsn | None:
        """Handle a message about a streamed transaction outside of its blocks; return its end, if it commits.

        Raises:
            ProtocolViolation: the message can't come there.
        """
        kind = message[0]
        if kind == kinds.STREAM_START:
            (self._block_xid,) = struct.unpack_from(">I", message, 1)
            self._block = self._streamed.get(self._block_xid)
            if self._block is None:
                self._block = self._streamed[self._block_xid] = _Streamed(self._spill.create(self._block_xid))
            return None
        if kind == kinds.STREAM_COMMIT:
            return self._commit_streamed(message)
        if kind == kinds.STREAM_ABORT:
            self._abort_streamed(message)
            return None
        raise ProtocolViolation(f"unexpected message {chr(kind)!r} outside of a streamed block")

    def is_too_large(self, received_bytes: int) -> bool:
        """Return whether a transaction that comes in one piece, and has so many bytes by now, goes into a file."""
        return received_bytes > self._memory_bytes_max

    def begin_whole(self, received: Sequence[MessageRun]) -> None:
        """Move the transaction that is being received from memory to a file.

        Raises:
            ProtocolViolation: it doesn't start with a Begin.
        """
        first = received[0]
        begin = first[0]
        if begin[0] != kinds.BEGIN:
            raise ProtocolViolation(f"a transaction starts with message {chr(begin[0])!r} instead of Begin")
        (self._whole_xid,) = struct.unpack_from(">I", begin, 17)
        self._whole = self._spill.create(self._whole_xid)
        self._whole.append(MessageRun(first.buffer, first.starts[1:], first.ends[1:]))
        for messages in received[1:]:
            self._whole.append(messages)

    def restart_streamed(self) -> None:
        """Drop open streamed transactions: if they go on at all, they come again from their beginning."""
        for xid, streamed in self._streamed.items():
            streamed.file.remove()
            self._put(StreamedAbort(xid))
        self._streamed.clear()

    def close(self) -> None:
        """Remove the files of streamed transactions that are still open."""
        for streamed in self._streamed.values():
            streamed.file.remove()

    def _commit_streamed(self, message: bytes) -> Lsn:
        commit = parse_message(message)
        assert isinstance(commit, StreamCommit)
        streamed = self._streamed.pop(commit.xid, None)
        if streamed is None:
            raise ProtocolViolation(f"the streamed transaction {commit.xid} commits, but never began")
        streamed.file.flush()
        self._put(Spilled(commit, streamed.file, frozenset(streamed.aborted), streamed=True))
        return commit.end_lsn

    def _abort_streamed(self, message: bytes) -> None:
        xid, subxid = _PAIR.unpack_from(message, 1)
        streamed = self._streamed.get(xid)
        if streamed is not None and xid == subxid:
            self._streamed.pop(xid).file.remove()
        elif streamed is not None:
            streamed.aborted.add(subxid)
        self._put(StreamedAbort(xid))

    def _end_whole(self, message: bytes) -> Lsn:
        assert self._whole is not None
        flags, lsn, end, time_us = COMMIT_FIELDS.unpack_from(message, 1)
        self._whole.flush()
        commit = StreamCommit(self._whole_xid, flags, Lsn(lsn), Lsn(end), time_us + POSTGRES_EPOCH_US)
        self._put(Spilled(commit, self._whole, frozenset(), streamed=False))
        self._whole = None
        return Lsn(end)

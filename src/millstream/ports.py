"""Define the ports as Protocols: what rooms need of one another and of the world, and each one's contract.

An implementation of a port passes the port's conformance suite in `millstream.testing`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol, Self, TypeAlias

from millstream.errors import MillstreamError
from millstream.model.buffered_operations import BufferedOp, BufferMeta, BufferOffset, ReadPause
from millstream.model.ids import Epoch, GroupNumber, ShardId, SourceId, WriterId
from millstream.model.operations import Ack, Submitted, WriteOps
from millstream.model.positions import Lsn, Seq, SeqRange
from millstream.model.replication import AckLevel, Acknowledgement, Hello, Shipment
from millstream.model.writes import SessionFacts
from millstream.protocol.replication.ack_levels import Holdings
from millstream.protocol.sequencer import Announcement, Drawn, LedgerView, Registration, WriterEntry


class Clock(Protocol):
    """A clock, and a way to wait."""

    def now_ns(self) -> int:
        """Return the wall clock in nanoseconds since 1970-01-01 UTC. It may step."""

    def monotonic_ns(self) -> int:
        """Return nanoseconds since an arbitrary moment.

        The clock never steps back. It includes the time the machine sleeps if the system can
        measure that.
        """

    def sleep(self, seconds: float) -> None:
        """Return after this many seconds."""


class WritableFile(Protocol):
    """A file open for writing at positions. Nothing is durable before `sync` has returned."""

    def pwrite(self, data: bytes | memoryview, position: int) -> None:
        """Write all of `data`, or raise `OSError` (then any part of it may have been written)."""

    def pwritev(self, buffers: Sequence[bytes | memoryview], position: int) -> None:
        """Write all buffers in sequence; otherwise as `pwrite`."""

    def sync(self) -> None:
        """Call fdatasync (F_FULLFSYNC on macOS). After an `OSError`, earlier writes may or may not be durable."""

    def truncate(self, size: int) -> None:
        """Set the file's length."""

    def allocate(self, size: int) -> None:
        """Reserve space for `size` bytes, so that writing them later needs no free space.

        Sets the file's length to `size`.
        """

    def lock(self) -> bool:
        """Take the file's exclusive lock until `close` or the process's death; False if another process holds it."""

    def is_at(self, path: str) -> bool:
        """Whether the path still names this file; another file may have been renamed over it."""

    def size(self) -> int:
        """Return the file's current length in bytes."""

    def close(self) -> None:
        """Close; doesn't sync."""


class Files(Protocol):
    """The file system under the log: real, in memory, or faulty. Paths are absolute strings.

    A new, renamed or removed name is durable only after `sync_dir` of its folder.
    """

    def create(self, path: str) -> WritableFile:
        """Make a new file; raises `FileExistsError` if the path exists."""

    def open_write(self, path: str) -> WritableFile:
        """Open an existing file for writing."""

    def read(self, path: str, position: int = 0, length: int | None = None) -> bytes:
        """Return the bytes `[position, position + length)`; fewer at the end of the file."""

    def size(self, path: str) -> int:
        """Return the file's length; raises `FileNotFoundError` if there is no such file."""

    def listdir(self, path: str) -> list[str]:
        """Return the names in a folder, sorted; raises `FileNotFoundError` if there is no such folder."""

    def is_folder(self, path: str) -> bool:
        """Whether the path is a folder; False for anything else."""

    def exists(self, path: str) -> bool:
        """Whether the path is a file or a folder; raises `OSError` if that can't be told, for example on a failing disk."""

    def rename(self, old: str, new: str) -> None:
        """Rename atomically, replacing `new`."""

    def remove(self, path: str) -> None:
        """Remove a file."""

    def makedirs(self, path: str) -> None:
        """Make a folder and its parents; does nothing if the folder exists."""

    def sync_dir(self, path: str) -> None:
        """Make the folder's names durable."""

    def disk_usage(self, path: str) -> tuple[int, int]:
        """Return (bytes used, bytes in total) of the disk under a path. Space reserved for root isn't included."""


class SeqReservations(Protocol):
    """Durable upper bounds of the numbers that may have been given out: the embedded sequencer's store."""

    def reserved(self) -> Seq:
        """Return the greatest number ever reserved; numbers up to it may have been given out."""

    def reserve_to(self, seq: Seq, *, epoch: Epoch) -> None:
        """Durably reserve up to `seq` (only upward). Raises `StaleEpoch` if a newer writer has registered."""


class SequenceStore(Protocol):
    """The state that several writers of one stream share: `protocol.sequencer.Ledger`, with its own clock and leases.

    Each call is one atomic, durable step. Only a draw may be undone by a crash of the store, as may later draws:
    unless other writers count its position, or a step of another kind follows it. Its numbers aren't given again.
    If a call raises `CatalogError`, its outcome is unknown: the step may have been executed, or may be executed later.

    Raises (from the steps):
        StaleEpoch: a newer incarnation has taken over; nothing was changed.
        SequencingError (`unknown_writer`): the stream has no such writer.
    """

    def register(self, name: str, location: str, *, above: Epoch = ...) -> Registration:
        """Become a writer's newest incarnation, with an epoch above every epoch in its log.

        Raises `writer_name_taken` if the writer is alive at another location.
        """

    def take_over(self, writer: WriterId) -> Registration:
        """Fence a writer whose lease has expired, to recover its log. Raises `SequencingError` (`writer_alive`) if it hasn't."""

    def recovered(self, writer: WriterId, epoch: Epoch) -> Drawn:
        """Report that the writer's log is recovered, and return an empty range that its numbers begin behind.

        The writer may draw once its marks stand at that position. Until it draws or reports, the
        other writers count its position among those elsewhere (`Drawn.elsewhere`).
        """

    def draw(self, writer: WriterId, epoch: Epoch, count: int, *, position: Seq) -> Drawn:
        """Give out the next `count` numbers and record the writer's position.

        Raises `invalid_count` for an impossible count.
        """

    def last(self, writer: WriterId, epoch: Epoch) -> SeqRange:
        """Return the newest range given to this incarnation; an empty one if it was given none."""

    def report(self, writer: WriterId, epoch: Epoch, *, position: Seq, is_shown: bool = True) -> tuple[LedgerView, Seq]:
        """Record a writer's position and renew its lease.

        Returns the positions of all writers, and the lowest position elsewhere (as in `Drawn`).
        `is_shown` is whether the writer's marks stand in its folder.
        """

    def settle(self, writer: WriterId, epoch: Epoch) -> None:
        """Record that nothing of the writer is undecided."""

    def forget(self, writer: WriterId) -> None:
        """Give up what a dead writer left undecided. Raises `SequencingError` (`writer_alive`) while its lease runs."""

    def view(self) -> LedgerView:
        """Return the positions of all writers."""

    def writers(self) -> Sequence[WriterEntry]:
        """Return all writers ever registered, ordered by number."""


class Announcements(Protocol):
    """A channel of hints between a stream's writers.

    Hints may be lost, duplicated, late and in any order. Nothing here raises.

    Concurrency: one thread.
    """

    def tell(self, told: Announcement) -> None:
        """Send a hint to the other writers. The sender doesn't receive it."""

    def hear(self, timeout_s: float) -> Sequence[Announcement]:
        """Return what other writers sent, as soon as there is something; nothing if the timeout passes first."""

    def close(self) -> None:
        """Stop sending and receiving."""


class LogAppender(Protocol):
    """The writer of a stream's shards, to which capture and ingest submit operations."""

    def submit(
        self,
        ops: Submitted,
        *,
        deadline_s: float | None = None,
        gives_up: Callable[[], bool] = lambda: False,
    ) -> Future[Ack]:
        """Queue operations for the next commit group, in order of the calls; blocks while the queue is full.

        The future ends when the operations are durable on all their shards. Any number of threads
        may call.

        Args:
            deadline_s: seconds for all of it; None: no bound.
            gives_up: asked several times a second while the queue is full; True ends the wait.

        Raises (or ends the future with):
            Overloaded: the queue stayed full until then; nothing was queued.
            DiskFull: no space; nothing was appended.
            AppendOutcomeUnknown: the disk failed under the group. Every later call gets `WriterClosed`.
            WriterClosed: this writer takes no more operations.
            LogError (`out_of_order`): the log hasn't reached what the operations name as `behind`, because an earlier append failed.
        """

    async def append_async(self, ops: Submitted, *, deadline_s: float | None = None) -> Ack:
        """Append as `submit` does, for a task: return once the operations are durable, without blocking the event loop.

        A commit group wakes each event loop once, however many of its tasks it resolves. Operations
        are appended in order of the calls, except those of tasks that had to wait for room. Tasks
        of any number of loops may call.

        If the caller is cancelled before its commit group starts, the operations aren't written.
        After that they are written, but the caller doesn't learn their outcome.

        Raises:
            As `submit`.
        """

    def reached(self) -> Mapping[SourceId, Lsn]:
        """Return, for each source, the commit end LSN up to which the durable log is complete."""

    def settled(self) -> Future[Ack] | None:
        """Return None if everything durable here is held elsewhere as the stream's acknowledgement level asks.

        Otherwise return a future that ends when it is. Only then may a source be sent the LSN that
        the log has reached.
        """

    def is_written(self) -> bool:
        """Whether everything submitted is durable here, so that pending futures wait only for other holders."""


class HighWater(Protocol):
    """How the writer of a stream learns how much of its log is held elsewhere.

    Concurrency: one thread at a time.
    """

    def begin(self, newest: GroupNumber) -> None:
        """Set the last commit group of the log that was opened.

        A place that reports more than this group now has another log. It doesn't count until its
        report changes.
        """

    def look(self) -> Holdings:
        """Return the current holdings. Cheap: called up to several thousand times a second while appends wait.

        Raises:
            LogError: the file of acknowledgements is of a newer version.
        """


class ApplicationLog(Protocol):
    """The target of applications' appends: a log's writer, or one that also has sinks."""

    def append(self, ops: Submitted, *, deadline_s: float | None = None, acks: AckLevel | None = None) -> Ack:
        """Append, and return once it is durable. Raises what the future of `LogAppender.submit` would end with."""

    async def append_async(
        self, ops: Submitted, *, deadline_s: float | None = None, acks: AckLevel | None = None
    ) -> Ack:
        """Append as `LogAppender.append_async` does."""

    def shown_upto(self) -> Seq:
        """Return the greatest number known up to which any reader may read, over the records of all writers."""

    def session(self, name: str, *, deadline_s: float | None = None) -> SessionFacts:
        """Return what the durable log has of a session.

        Raises `SessionsNeedOneWriter` if this writer keeps no sessions.
        """


class BufferWriting(Protocol):
    """The write half of a write buffer.

    Concurrency: any number of threads.
    """

    def shards(self) -> tuple[ShardId, ...]:
        """Return the shards in order. Raises `BufferUnavailable` or `BufferMissing` if they can't be determined."""

    def submit(self, shard: ShardId, op: WriteOps, *, deadline_s: float | None = None) -> Future[BufferMeta]:
        """Store one operation on a shard, behind those submitted before; the future ends when it is stored.

        Several operations may travel together, but each is stored separately. Operations of
        different shards or partitions are never mixed, and each keeps its own time, session and
        trace.

        Args:
            shard: the target, whatever shards the rows name.
            op: exactly one operation, with at least one row.
            deadline_s: how long to wait for room, and then for the answer; None: the buffer's configured time.

        Raises (or ends the future with):
            WriteBufferError (`unknown_buffer_shard`): there is no such shard; nothing was stored.
            Overloaded: too much is in flight; nothing was stored.
            IngestError (`rows_too_large`): the buffer takes no operation of that size; nothing was stored.
            BufferUnavailable, BufferRefused, BufferMissing: nothing was stored.
            BufferOutcomeUnknown: the operation was sent, and no answer came in time; it may or may not be stored.
            WriterClosed: the buffer was closed; nothing was stored.
        """

    def append(self, shard: ShardId, op: WriteOps, *, deadline_s: float | None = None) -> BufferMeta:
        """Store one operation, and return once it is stored. Raises what the future of `submit` would end with."""

    def flush(self, *, deadline_s: float | None = None) -> None:
        """Return once everything submitted before is resolved, whatever the outcome.

        Raises `BufferOutcomeUnknown` past the deadline.
        """

    def close(self) -> None:
        """Resolve what is in flight, within the buffer's own timeout, and take no more."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class ShardReader(Protocol):
    """A reader of one shard of a write buffer, with a private position.

    Concurrency: one thread a reader; any number of readers of a shard.
    """

    @property
    def shard(self) -> ShardId:
        """The shard that it reads."""

    @property
    def place(self) -> BufferOffset:
        """The lowest offset that `read` may return next.

        It moves when `read` returns an item, or raises `BufferedOpUndecodable` for one.
        """

    def read(self, *, wait_s: float = 0.0) -> BufferedOp | ReadPause:
        """Return the next operation.

        Args:
            wait_s: how long to wait if there is none yet.

        Returns:
            The operation; `PENDING` if none came in time; `ENDED` from `BufferOffsetGone` until the next seek.

        Raises:
            BufferedOpUndecodable: the next item holds no operation. The position is behind it: the next call continues.
            BufferOffsetGone: the item at the position was dropped. Raised once.
            WriteBufferError (`buffer_truncated`, `buffer_replaced`): the buffer ends before the position, or was created again. Raised always.
            BufferUnavailable: the server can't be asked; the position is unchanged.
            BufferMissing, BufferRefused: likewise, until an operator acts.
        """

    def seek(self, offset: BufferOffset) -> None:
        """Read from that offset on. If the offset is gone, the next `read` raises.

        Raises:
            WriteBufferError (`buffer_seek_beyond_end`): the offset lies past `end_offset()`; the reader's position is unchanged.
            BufferUnavailable: as `read`.
        """

    def seek_earliest(self) -> None:
        """Read from the smallest offset available now, where a new reader begins. Raises as `read`."""

    def end_offset(self) -> BufferOffset:
        """Return a lower bound of the next operation's offset; 0 if the shard never had any. Raises as `read`."""

    def close(self) -> None:
        """Release the reader's resources; other readers continue."""


class BufferReading(Protocol):
    """The read half of a write buffer. Operations can be read any number of times."""

    def shards(self) -> tuple[ShardId, ...]:
        """Return the shards in order."""

    def identity(self) -> str:
        """Return the buffer's permanent identity, which differs if the buffer is created again under its name."""

    def reader(self, shard: ShardId) -> ShardReader:
        """Return a new reader of a shard, at its smallest offset.

        Raises `unknown_buffer_shard` if there is no such shard; else as `read`.
        """

    def close(self) -> None:
        """Release the buffer's resources, and those of its readers."""


class WriteBuffer(BufferWriting, BufferReading, Protocol):
    """Both halves of a write buffer, which holds operations between their producers and the log."""


SinkOutcome: TypeAlias = Mapping[str, object] | MillstreamError
"""JSON-able facts of where a sink stored an operation's rows, or the error. The error states whether
the rows may be stored."""


class RecordSink(Protocol):
    """A sink of applications' rows outside the log's shards, as routing sends them.

    Concurrency: any number of threads.
    """

    def append(self, ops: WriteOps, *, deadline_s: float | None) -> Sequence[SinkOutcome]:
        """Take operations' rows; return each operation's outcome, in order, once it is known.

        Args:
            ops: each with at least one row.
            deadline_s: how long to wait for room, and for the answer.

        Raises:
            MillstreamError: the outcome of every operation.
        """

    def close(self) -> None:
        """Resolve what is in flight, and take no more."""


class FollowerLink(Protocol):
    """The leader's end of a connection to one follower. Messages arrive in order; after one is lost, none arrives.

    Concurrency: one thread sends, one receives; any may close.
    """

    @property
    def hello(self) -> Hello:
        """The follower's first message."""

    def send(self, shipment: Shipment) -> None:
        """Send a shipment; waits while more bytes are in flight than the follower has room for.

        Raises:
            LinkLost: the link broke; what was sent without an acknowledgement may or may not have arrived.
        """

    def recv(self, timeout_s: float) -> Acknowledgement | Hello | None:
        """Return the follower's next message: an acknowledgement, or a `Hello`.

        A `Hello` asks for everything behind its position again. None if nothing came in time.
        Raises `LinkLost`, or the error with which the follower refused to continue.
        """

    def refuse(self, error: MillstreamError) -> None:
        """Send the follower the reason why it gets nothing more, behind earlier shipments; then close the link.

        Raises nothing.
        """

    def close(self) -> None:
        """Break the link; callers that wait in it get `LinkLost`."""


class LeaderLink(Protocol):
    """The follower's end of a connection to its leader.

    Concurrency: as `FollowerLink`.
    """

    def recv(self, timeout_s: float) -> Shipment | None:
        """Return the next shipment; None if none came in time.

        Raises:
            LinkLost: the link broke.
            ShipmentUnreadable: the received bytes are damaged; the link is no longer usable.
            Fenced, ReplicationError (`other_stream`), FollowerBehindRetention, AccessError …: the leader's reason to refuse the follower.
        """

    def send(self, word: Acknowledgement | Hello | MillstreamError) -> None:
        """Send an acknowledgement, ask for everything behind a position, or report why the follower stops.

        Raises `LinkLost`.
        """

    def close(self) -> None:
        """Break the link."""


class Transport(Protocol):
    """The transport of shipments from a leader to its followers. Followers connect; the leader accepts.

    Every implementation passes `millstream.testing.transport`.
    """

    def accept(self, timeout_s: float) -> FollowerLink | None:
        """Return the next follower's link, at the leader; None if none came in time.

        An object store raises `StoreUnavailable`.
        """

    def connect(self, hello: Hello, timeout_s: float) -> LeaderLink:
        """Return a link to the leader, at a follower.

        Raises `LinkLost` if it can't be reached in time, `StoreUnavailable`, `AccessError`.
        """

    def close(self) -> None:
        """Break all links, and accept no more."""

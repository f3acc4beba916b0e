"""The seams, as Protocols: what rooms need of one another and of the world, and the contract of each.

An implementation of a port passes the port's conformance suite in `millstream.testing`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol, Self, TypeAlias

from millstream.errors import MillstreamError
from millstream.model.appends import Submitted
from millstream.model.buffers import BufferedOp, BufferMeta, BufferOffset, ReadPause
from millstream.model.ids import Epoch, GroupNumber, ShardId, SourceId, WriterId
from millstream.model.operations import Ack, WriteOps
from millstream.model.positions import Lsn, Seq, SeqRange
from millstream.model.replication import AckLevel, Acknowledgement, Hello, Holdings, Shipment
from millstream.model.writes import SessionFacts
from millstream.protocol.sequencer import Announcement, Drawn, LedgerView, Registration, WriterEntry


class Clock(Protocol):
    """Time, and waiting for it to pass."""

    def now_ns(self) -> int:
        """Wall clock: nanoseconds since 1970-01-01 UTC; may step."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since some moment; never steps back, and goes on while the machine sleeps where the system can tell."""

    def sleep(self, seconds: float) -> None:
        """Return after that much time."""


class WritableFile(Protocol):
    """A file open for writing at positions. Nothing is durable before `sync` has returned."""

    def pwrite(self, data: bytes | memoryview, position: int) -> None:
        """Write all of `data`, or raise `OSError` (then any part of it may have been written)."""

    def pwritev(self, buffers: Sequence[bytes | memoryview], position: int) -> None:
        """Write all buffers one after the other, as `pwrite` does one."""

    def sync(self) -> None:
        """fdatasync (F_FULLFSYNC on macOS). After an `OSError` nothing may be assumed of what was written before."""

    def truncate(self, size: int) -> None:
        """Set the file's length."""

    def allocate(self, size: int) -> None:
        """Reserve space for `size` bytes, so that writing them later needs no free space; the file has that length then."""

    def lock(self) -> bool:
        """Take the file's exclusive lock, kept until `close` or the process's death; False where another holds it."""

    def is_at(self, path: str) -> bool:
        """Whether the path still names this file: another may have been renamed over it."""

    def size(self) -> int:
        """The file's present length in bytes."""

    def close(self) -> None:
        """Close; doesn't sync."""


class Files(Protocol):
    """The file system under the log: real, in memory, or faulty. Paths are absolute strings.

    A new, renamed or removed name is durable only after `sync_dir` of its folder.
    """

    def create(self, path: str) -> WritableFile:
        """Make a new file; `FileExistsError` where there is one."""

    def open_write(self, path: str) -> WritableFile:
        """Open an existing file for writing."""

    def read(self, path: str, position: int = 0, length: int | None = None) -> bytes:
        """Bytes `[position, position + length)`; fewer at the end of the file."""

    def size(self, path: str) -> int:
        """The file's length; `FileNotFoundError` where there is none."""

    def listdir(self, path: str) -> list[str]:
        """Names in a folder, sorted; `FileNotFoundError` where there is none."""

    def is_folder(self, path: str) -> bool:
        """Whether there is a folder of that name; False for anything else."""

    def exists(self, path: str) -> bool:
        """Whether there is a file or folder of that name."""

    def rename(self, old: str, new: str) -> None:
        """Atomic; replaces `new`."""

    def remove(self, path: str) -> None:
        """Remove a file."""

    def makedirs(self, path: str) -> None:
        """Make a folder and those above it; fine where it exists."""

    def sync_dir(self, path: str) -> None:
        """Make the folder's names durable."""

    def disk_usage(self, path: str) -> tuple[int, int]:
        """(bytes used, bytes in all) of the disk under a path, as seen by an ordinary user: what only root may use isn't in it."""


class SeqReservations(Protocol):
    """Durable upper bounds of the numbers that may have been given out; the embedded sequencer's store."""

    def reserved(self) -> Seq:
        """The greatest number ever reserved; numbers up to it may have been given out."""

    def reserve_to(self, seq: Seq, *, epoch: Epoch) -> None:
        """Durably reserve up to `seq` (only upward). `StaleEpoch` where a newer writer has registered."""


class SequenceStore(Protocol):
    """What several writers of one stream share: `protocol.sequencer.Ledger`, with a clock and a lease of its own.

    Each call is one atomic, durable step. A call that raises `CatalogBusy` or `CatalogError` may have been executed, and may still be:
    its outcome is unknown.

    Raises (from the steps):
        StaleEpoch: a newer incarnation has taken over; nothing was changed.
        UnknownWriter: the stream has no such writer.
    """

    def register(self, name: str, location: str, *, above: Epoch = ...) -> Registration:
        """Become a writer's newest incarnation, above every epoch that its log bears. `WriterNameTaken` where it lives elsewhere."""

    def take_over(self, writer: WriterId) -> Registration:
        """Fence a writer whose lease has run out, to recover its log. `WriterAlive` where it hasn't."""

    def recovered(self, writer: WriterId, epoch: Epoch) -> Drawn:
        """Its log is recovered: it may draw, from behind the (empty) range that is returned, once its marks stand at that position.

        Until it has drawn or reported, the other writers count its position as they count those elsewhere.
        """

    def draw(self, writer: WriterId, epoch: Epoch, count: int, *, position: Seq) -> Drawn:
        """Give the next `count` numbers, and take the writer's position along. `InvalidCount` where there are no such."""

    def last(self, writer: WriterId, epoch: Epoch) -> SeqRange:
        """The newest range given to this incarnation; an empty one where it was given none."""

    def report(self, writer: WriterId, epoch: Epoch, *, position: Seq, is_shown: bool = True) -> tuple[LedgerView, Seq]:
        """Say where a writer stands and renew its lease; returns where all do, and the lowest position elsewhere (as `Drawn`).

        `is_shown` says whether the writer's marks stand in its folder.
        """

    def settle(self, writer: WriterId, epoch: Epoch) -> None:
        """Nothing of the writer is undecided any more."""

    def forget(self, writer: WriterId) -> None:
        """Give up what a dead writer left undecided. `WriterAlive` where its lease runs."""

    def view(self) -> LedgerView:
        """Where all writers stand."""

    def writers(self) -> Sequence[WriterEntry]:
        """All writers ever registered, by their numbers."""


class Announcements(Protocol):
    """What writers of a stream call out to each other: hints, which may be lost, doubled, late and in any order. Nothing here raises.

    Concurrency: one thread.
    """

    def tell(self, told: Announcement) -> None:
        """Call it out to the others; it isn't heard here."""

    def hear(self, timeout_s: float) -> Sequence[Announcement]:
        """What others called out: as soon as there is something, else nothing, after that many seconds."""

    def close(self) -> None:
        """Nothing is told or heard any more."""


class LogAppender(Protocol):
    """Where capture and ingest put operations: the writer of a stream's shards."""

    def submit(self, ops: Submitted, *, deadline_s: float | None = None) -> Future[Ack]:
        """Queue for the next commit group, in order of the calls; blocks while the queue is full.

        The future ends when the operations are durable on all their shards. Any number of threads may call.

        Raises (or ends the future with):
            Overloaded: the queue stayed full past the deadline; nothing was queued.
            DiskFull: no space; nothing was appended.
            AppendOutcomeUnknown: the disk failed under the group. Every later call gets `WriterClosed`.
            WriterClosed: this writer takes no more.
            OutOfOrder: what it says to be `behind` isn't in the log: an append before it failed.
            InvalidValue: a value of an `AppendOp` isn't of its column's type; nothing of it was appended.
        """

    async def append_async(self, ops: Submitted, *, deadline_s: float | None = None) -> Ack:
        """As `submit` for a task: returns once the operations are durable; the event loop goes on meanwhile.

        A commit group wakes each event loop once, however many of its tasks it answers. Order is that of the calls, but for tasks
        that had to wait for room. Tasks of any number of loops may call.

        Cancelled while they wait for their group, the operations aren't written. Once it has begun they are, though nobody
        is told.

        Raises:
            As `submit`.
        """

    def reached(self) -> Mapping[SourceId, Lsn]:
        """For each source, the commit end LSN up to which the durable log has everything."""

    def settled(self) -> Future[Ack] | None:
        """None where all that is durable here is held elsewhere as the stream's level says; else a future that ends when it is.

        A source may be told of what the log has reached only then.
        """

    def is_written(self) -> bool:
        """Whether all that was submitted is durable here, so that futures which haven't ended wait for others alone."""


class HighWater(Protocol):
    """Where the writer of a stream learns how much of its log is held elsewhere.

    Concurrency: one thread at a time.
    """

    def begin(self, newest: GroupNumber) -> None:
        """The log was opened and ends with that group: who says now that it holds more has another log, and doesn't count before it says otherwise."""

    def look(self) -> Holdings:
        """What is known now. Cheap: it is called up to several thousand times a second while somebody waits.

        Raises:
            LogError: what tells it is of a newer version.
        """


class ApplicationLog(Protocol):
    """What applications' rows are appended to: a log's writer, or one with sinks beside it."""

    def append(self, ops: Submitted, *, deadline_s: float | None = None, acks: AckLevel | None = None) -> Ack:
        """Append, and return once it is durable; raises what `LogAppender.submit`'s future would end with."""

    async def append_async(
        self, ops: Submitted, *, deadline_s: float | None = None, acks: AckLevel | None = None
    ) -> Ack:
        """As `LogAppender.append_async`."""

    def shown_upto(self) -> Seq:
        """The greatest number known up to which any reader may read, whichever writer's records they are."""

    def session(self, name: str, *, deadline_s: float | None = None) -> SessionFacts:
        """What the durable log has of an application's session; `SessionsNeedOneWriter` where this writer knows none."""


class BufferWriting(Protocol):
    """The half of a write buffer that operations go into.

    Concurrency: any number of threads.
    """

    def shards(self) -> tuple[ShardId, ...]:
        """The shards that there are, in order. `BufferUnavailable`, `BufferMissing` where that can't be told."""

    def submit(self, shard: ShardId, op: WriteOps, *, deadline_s: float | None = None) -> Future[BufferMeta]:
        """Store one operation on a shard, behind those submitted to it before; the future ends when it is actually stored.

        Several operations may travel together, but each is stored by itself: those of several shards or partitions are never mixed, and
        each keeps its own time, session and trace.

        Args:
            shard: where, whatever shards the rows name.
            op: exactly one operation, with at least one row.
            deadline_s: how long to wait for room, and then for the answer; None: as long as the buffer is configured to.

        Raises (or ends the future with):
            UnknownBufferShard: there is no such shard; nothing was stored.
            Overloaded: too much is on its way; nothing was stored.
            RowsTooLarge: the buffer takes no operation of that size; nothing was stored.
            BufferUnavailable, BufferRefused, BufferMissing: nothing was stored.
            BufferOutcomeUnknown: it was sent, and no answer came in time: it may or may not be stored.
            WriterClosed: the buffer was closed; nothing was stored.
        """

    def append(self, shard: ShardId, op: WriteOps, *, deadline_s: float | None = None) -> BufferMeta:
        """Store one operation, and return once it is stored; raises what `submit`'s future would end with."""

    def flush(self, *, deadline_s: float | None = None) -> None:
        """Return once all that was submitted before has its answer, whatever that is. `BufferOutcomeUnknown` past the deadline."""

    def close(self) -> None:
        """Answer what is on its way, within the buffer's own patience, and take no more."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class ShardReader(Protocol):
    """Reads one shard of a write buffer from a place of its own, which nobody else sees or moves.

    Concurrency: one thread a reader; any number of readers of a shard.
    """

    @property
    def shard(self) -> ShardId:
        """Whose operations it reads."""

    @property
    def place(self) -> BufferOffset:
        """The lowest offset that `read` may return next. It moves when an item is returned, or was said not to be decodable."""

    def read(self, *, wait_s: float = 0.0) -> BufferedOp | ReadPause:
        """The next operation.

        Args:
            wait_s: how long to wait for one where there is none.

        Returns:
            The operation; `PENDING` where none came in time; `ENDED` once `BufferOffsetGone` was said, until somebody seeks.

        Raises:
            BufferedOpUndecodable: the next item holds no operation. The place is behind it: the next call goes on.
            BufferOffsetGone: what lay at the place was dropped. Said once.
            BufferTruncated, BufferReplaced: the buffer ends before the place, or was made anew. Said at every call.
            BufferUnavailable: the server can't be asked; the place is what it was.
            BufferMissing, BufferRefused: likewise, until a person has done something.
        """

    def seek(self, offset: BufferOffset) -> None:
        """Read from that offset on. That it is gone is said by the next `read`.

        Raises:
            BufferSeekBeyondEnd: it lies past `end_offset()`; the reader stays where it was.
            BufferUnavailable: as `read`.
        """

    def seek_earliest(self) -> None:
        """Read from the smallest offset on that there is now: where a new reader begins. Raises as `read`."""

    def end_offset(self) -> BufferOffset:
        """The offset that the next operation gets, at the least; 0 where there was none ever. Raises as `read`."""

    def close(self) -> None:
        """Give up what it holds; other readers go on."""


class BufferReading(Protocol):
    """The half of a write buffer that operations come out of, as often as anybody asks."""

    def shards(self) -> tuple[ShardId, ...]:
        """The shards that there are, in order."""

    def identity(self) -> str:
        """What tells this buffer from one that was made anew under its name; the same for ever."""

    def reader(self, shard: ShardId) -> ShardReader:
        """A new reader of a shard, at the smallest offset there is on it. `UnknownBufferShard` where there is no such shard; else as `read`."""

    def close(self) -> None:
        """Give up what it holds, its readers too."""


class WriteBuffer(BufferWriting, BufferReading, Protocol):
    """Both halves: what holds operations between those who write them and those who take them into a log."""


SinkOutcome: TypeAlias = Mapping[str, object] | MillstreamError
"""JSON-able facts of where a sink has an operation's rows; else why they aren't known to be stored there, which says whether they may be."""


class RecordSink(Protocol):
    """What takes rows of applications beside the log's shards, as routing sends them.

    Concurrency: any number of threads.
    """

    def append(self, ops: WriteOps, *, deadline_s: float | None) -> Sequence[SinkOutcome]:
        """Take operations' rows; return what became of each operation, in their order, once that is known.

        Args:
            ops: each with at least one row.
            deadline_s: how long to wait for room, and for the answer.

        Raises:
            MillstreamError: what would have become of each.
        """

    def close(self) -> None:
        """Answer what is on its way, and take no more."""


class FollowerLink(Protocol):
    """The leader's end of a connection to one follower. What is sent arrives in order, or not at all from some point on: then it broke.

    Concurrency: one thread sends, one receives; any may close.
    """

    @property
    def hello(self) -> Hello:
        """The follower's first word."""

    def send(self, shipment: Shipment) -> None:
        """Hand over; waits while more bytes are on their way than the follower has room for.

        Raises:
            LinkLost: it broke; what was sent without an acknowledgement may or may not have arrived.
        """

    def recv(self, timeout_s: float) -> Acknowledgement | Hello | None:
        """What the follower says next: an acknowledgement, or a `Hello` that asks for all behind its position once more.

        None where nothing came in time. Raises `LinkLost`, or the error with which the follower has refused to go on.
        """

    def refuse(self, error: MillstreamError) -> None:
        """Tell the follower why it gets nothing more, behind what was sent before; then the link is closed. Raises nothing."""

    def close(self) -> None:
        """Break it; whoever waits in it gets `LinkLost`."""


class LeaderLink(Protocol):
    """The follower's end of a connection to its leader.

    Concurrency: as `FollowerLink`.
    """

    def recv(self, timeout_s: float) -> Shipment | None:
        """The next shipment; None where none came in time.

        Raises:
            LinkLost: it broke.
            ShipmentUnreadable: what came is damaged; the link is of no use any more.
            Fenced, OtherStream, FollowerBehindRetention, AccessError …: what the leader refuses the follower with.
        """

    def send(self, word: Acknowledgement | Hello | MillstreamError) -> None:
        """Say what was applied, ask for what lies behind a position, or say why it doesn't go on. Raises `LinkLost`."""

    def close(self) -> None:
        """Break it."""


class Transport(Protocol):
    """How shipments get from a leader to its followers. Who follows connects; who leads accepts.

    Every implementation passes `millstream.testing.transport`.
    """

    def accept(self, timeout_s: float) -> FollowerLink | None:
        """The next follower that came, at the leader; None where none did in time. Raises `StoreUnavailable`, `StoreUnusable` of an object store."""

    def connect(self, hello: Hello, timeout_s: float) -> LeaderLink:
        """A link to the leader, at a follower. Raises `LinkLost` where it can't be reached in time, `StoreUnavailable`, `AccessError`."""

    def close(self) -> None:
        """Break all links, and take no more."""

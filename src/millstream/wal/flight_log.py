"""A log's bytes over Arrow Flight, for processes that don't see its folder: both ends, and what travels between them.

A reader fetches the pieces of its spans once, into a file without a name on its own disk. From there it reads
them as it would read the log's segments.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import pyarrow as pa

from millstream.backoff import Backoff
from millstream.codec.log_segment import SEGMENT_HEADER_SIZE
from millstream.errors import EngineError, OffsetExpired, UsageError, error_of
from millstream.model.ids import ShardId
from millstream.model.positions import Offset
from millstream.wal.files import RealFiles
from millstream.wal.layout import segment_path, shard_folder
from millstream.wal.reader import StreamReader
from millstream.wal.reading.segment_reader import LogSpan

PIECES: Final = pa.schema([("bytes", pa.binary())])
"""Schema of an answer: its rows' bytes, one after the other, are the requested ranges."""
_PIECE_BYTES: Final = 1 << 20
_RANGES_MAX: Final = 100_000
_REACHED_WITHIN_S: Final = 60.0
"""How long a reader tries to reach the server, which may be starting or have its hands full."""
_TOKEN_CODES: Final = frozenset({"unauthenticated", "access_token_expired"})
"""Refusals of a token that a next driver replaces: it was valid for too short a time, or was revoked."""
_FIELDS: Final = frozenset({"stream", "shard", "base", "ranges"})


@dataclass(frozen=True, slots=True)
class SegmentRequest:
    """A ticket for ranges of bytes of one segment."""

    stream: str
    shard: ShardId
    base: Offset
    """The segment's first offset."""
    ranges: tuple[tuple[int, int], ...]
    """Half-open, in bytes."""

    @classmethod
    def parse(cls, ticket: bytes) -> Self | None:
        """Parse a ticket; None if it is of another kind. `UsageError` if it is malformed."""
        try:
            facts = json.loads(ticket)
        except (ValueError, RecursionError):
            return None
        if not isinstance(facts, dict) or "ranges" not in facts:
            return None
        numbers = [facts.get("shard"), facts.get("base")]
        ranges: tuple[tuple[int, int], ...] = ()
        try:
            ranges = tuple((start, end) for start, end in facts["ranges"])
            numbers += [number for pair in ranges for number in pair]
            is_right = facts.keys() == _FIELDS and isinstance(facts["stream"], str) and len(ranges) <= _RANGES_MAX
            is_right = is_right and all(type(number) is int and number >= 0 for number in numbers)
        except (TypeError, ValueError):
            is_right = False
        if not is_right or any(start > end for start, end in ranges):
            raise UsageError("a request for a segment's bytes that can't be read")
        return cls(facts["stream"], ShardId(facts["shard"]), Offset(facts["base"]), ranges)

    def ticket(self) -> bytes:
        """Return the ticket that `parse` accepts."""
        facts = {"stream": self.stream, "shard": int(self.shard), "base": int(self.base), "ranges": self.ranges}
        return json.dumps(facts).encode()


def requested_pieces(reader: StreamReader, folder: str, asked: SegmentRequest) -> Iterator[pa.RecordBatch]:
    """Yield a request's bytes, in batches of `PIECES`.

    Raises:
        UsageError: the bytes aren't readable yet.
        OffsetExpired: retention has dropped the segment.
    """
    mark = reader.extent.marks()[0].get(asked.shard)
    last = max((end for _, end in asked.ranges), default=0)
    if mark is None or (asked.base, last) > (
        mark.base_offset,
        mark.byte_end if asked.base == mark.base_offset else last,
    ):
        raise UsageError(f"shard {asked.shard} has no readable bytes up to {last} of the segment at {asked.base}")
    path = segment_path(shard_folder(folder, asked.shard), asked.base)
    files = RealFiles()
    for start, end in asked.ranges:
        for position in range(start, end, _PIECE_BYTES):
            try:
                data = files.read(path, position, min(_PIECE_BYTES, end - position))
            except FileNotFoundError as error:
                first = reader.first_seq()
                raise OffsetExpired(
                    f"retention dropped segment {asked.base}; the first number left is {first}", first=int(first)
                ) from error
            yield pa.record_batch([pa.array([data], pa.binary())], schema=PIECES)


@dataclass(frozen=True, slots=True)
class FlightLog:
    """The address of a stream's log at a node's Flight server, with a token that may read the stream."""

    place: str
    """`host:port`."""
    stream: str
    is_tls: bool = False
    authority: bytes | None = field(default=None, repr=False)
    """The certificates that the server's must come from, in PEM; None: the system's."""
    token: str | None = field(default=None, repr=False)
    within_s: float = _REACHED_WITHIN_S
    """How long to try to reach the server."""

    def reader(self, spans: Sequence[LogSpan], *, definitions: bool = True) -> StreamReader:
        """Fetch the spans' bytes, and return a reader that reads these spans and nothing else; `definitions` as `StreamReader`.

        Raises:
            EngineError (`log_unreachable`): the server can't be reached, or the token has expired.
            MillstreamError: it refuses: the token lacks the right, retention has dropped a segment.
        """
        files = FetchedSegments()
        by_path: dict[str, list[LogSpan]] = {}
        for span in spans:
            by_path.setdefault(span.path, []).append(span)
        for path, some in by_path.items():
            ranges = [(0, SEGMENT_HEADER_SIZE)]
            ranges += [(s.position, s.position + s.length) for span in some for s in span.schema_frames]
            ranges += [(span.byte_start, span.byte_end) for span in some]
            request = SegmentRequest(self.stream, some[0].shard, _base(path), tuple(joined(ranges)))
            self._fetch(request, files, path)
        folder = spans[0].path.rsplit("/", 2)[0] if spans else "/"
        return StreamReader(folder, files=files, definitions=definitions)

    def _fetch(self, request: SegmentRequest, files: FetchedSegments, path: str) -> None:
        import pyarrow.flight as fl

        end = time.monotonic() + self.within_s
        pause = Backoff(0.1, 2.0, factor=2)
        while True:
            try:
                with self._client() as client:
                    for position, data in _placed(request, client.do_get(fl.Ticket(request.ticket()), self._options())):
                        files.put(path, position, data)
                return
            except (fl.FlightUnavailableError, fl.FlightTimedOutError) as error:
                if time.monotonic() + (wait_s := pause.next_s()) > end:
                    raise self._unreachable(error) from error
                time.sleep(wait_s)
            except (fl.FlightError, pa.ArrowException, OSError) as error:
                facts = _facts(error)
                if facts is not None and facts["code"] not in _TOKEN_CODES:
                    raise error_of(facts) from error
                raise self._unreachable(error) from error

    def _client(self) -> Any:
        import pyarrow.flight as fl

        options: dict[str, Any] = {"generic_options": [("grpc.use_local_subchannel_pool", 1)]}
        if self.is_tls and self.authority is not None:
            options["tls_root_certs"] = self.authority
        return fl.FlightClient(f"{'grpc+tls' if self.is_tls else 'grpc'}://{self.place}", **options)

    def _options(self) -> Any:
        import pyarrow.flight as fl

        headers = [] if self.token is None else [(b"authorization", f"Bearer {self.token}".encode())]
        return fl.FlightCallOptions(headers=headers)

    def _unreachable(self, error: Exception) -> EngineError:
        import socket

        facts = str(error).splitlines()[0] if str(error) else type(error).__name__
        return EngineError(
            f"{socket.gethostname()} can't read the log of {self.stream} from Flight at {self.place}: {facts}",
            code="log_unreachable",
        )


class FetchedSegments(RealFiles):
    """Pieces of segments on this machine's disk, in place of the segments. Only reads are answered."""

    def __init__(self) -> None:
        self._fetched: dict[str, Any] = {}

    def put(self, path: str, position: int, data: bytes) -> None:
        """Store a piece of a segment."""
        if path not in self._fetched:
            # Spark names disks for such files; the file has no name, so it ends with the process.
            folder = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or None
            self._fetched[path] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it lasts as long as this value
        os.pwrite(self._fetched[path].fileno(), data, position)

    def read(self, path: str, position: int = 0, length: int | None = None) -> bytes:
        """See `Files`."""
        if path not in self._fetched:
            raise FileNotFoundError(path)
        descriptor = self._fetched[path].fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size - position if length is None else length, position)


def joined(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the same bytes as ranges in order, none of which touch."""
    held: tuple[int, int] | None = None
    for start, end in sorted(ranges):
        if held is not None and start <= held[1]:
            held = held[0], max(held[1], end)
            continue
        if held is not None:
            yield held
        held = start, end
    if held is not None:
        yield held


def _base(path: str) -> Offset:
    return Offset(int(path.rsplit("/", 1)[-1].removesuffix(".wal")))


def _placed(request: SegmentRequest, answer: Any) -> Iterator[tuple[int, bytes]]:
    """Yield an answer's pieces with their positions. `OSError` if it breaks off."""
    ranges = iter(request.ranges)
    position = end = 0
    for chunk in answer:
        for piece in chunk.data.column(0):
            data = piece.as_py()
            if position == end:
                position, end = next(ranges)
            yield position, data
            position += len(data)
    if position != end or next(ranges, None) is not None:
        raise OSError("the answer ends before its last byte")


def _facts(error: Exception) -> dict[str, Any] | None:
    """Return the error of ours that a Flight error carries."""
    try:
        facts = json.loads(getattr(error, "extra_info", b"") or b"null")
    except ValueError:
        return None
    return facts if isinstance(facts, dict) and "code" in facts else None

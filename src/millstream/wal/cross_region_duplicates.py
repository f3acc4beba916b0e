"""Writes that an application sent to two regions before these had each other's log: merged rows count one of them.

The regions' logs hold such a write twice, under the same session and number or the same idempotency key. The write with
the lower hybrid time counts, and between equal times that of the lower region. So the answer depends on the logs alone,
not on the order in which they arrived. Every other copy is a *repeat*. Its rows are subtracted as rows of their own
(`crdt.row_merge`), because a region's sums may have its rows already when the other log arrives.

Ids are read from the logs that the home has. The newest `WRITES_MAX` of each region are known. A write whose other copy
is older than these, or whose rows retention has dropped, is counted twice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from millstream.crdt.region_state import HeardEnd, Vector, behind
from millstream.errors import LogError, LogTruncated, TokenFromFuture
from millstream.model.ids import RegionId, StreamId
from millstream.model.positions import Seq
from millstream.wal.truncation_check import end_at, still_says
from millstream.wal.writing.deduplicated_commits import writes_of

if TYPE_CHECKING:
    from millstream.wal.reader import StreamReader

WRITES_MAX: Final = 1_000_000
"""Number of writes known of each region, as many as a writer keeps keys."""
_AT_ONCE: Final = 65_536
_GAP: Final = 4096
"""Repeats that are at most so many numbers apart are read together."""
_WRITE: Final = np.dtype([("id", "<u8"), ("check", "<u8"), ("wall_ns", "<i8"), ("first", "<i8"), ("last", "<i8")])
"""A write: a hash of its id and rows in two halves, its hybrid time, and its numbers."""

_Writes = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A repeat: its numbers in the log of its region, and the end of the earlier write in another one."""

    region: RegionId
    first: Seq
    last: Seq
    earlier: RegionId
    earlier_last: Seq

    def is_within(self, vector: Vector) -> bool:
        """Return whether both writes have been received."""
        return self.last <= behind(vector, self.region) and self.earlier_last <= behind(vector, self.earlier)


@dataclass(slots=True)
class _Known:
    """The part that was read of one region's log."""

    stream: StreamId
    upto: Seq = Seq(0)
    end: HeardEnd | None = None
    blocks: list[_Writes] = field(default_factory=list)
    """Writes, each block ordered by id, larger blocks first."""

    def add(self, block: _Writes) -> None:
        """Add writes. Blocks of about one size become one, so that there are few."""
        self.blocks.append(block)
        while len(self.blocks) > 1 and len(self.blocks[-2]) <= 2 * len(self.blocks[-1]):
            self.blocks[-2:] = [_by_id(np.concatenate(self.blocks[-2:]))]
        if sum(map(len, self.blocks)) > WRITES_MAX + _AT_ONCE:
            every = np.concatenate(self.blocks)
            newest = np.argpartition(every["first"], -WRITES_MAX)[-WRITES_MAX:]
            self.blocks = [_by_id(every[newest])]

    def find(self, block: _Writes) -> Iterator[tuple[Any, Any]]:
        """Yield pairs of writes with one id: one of a block, and the known one."""
        for known in self.blocks:
            places = np.searchsorted(known["id"], block["id"]).clip(max=len(known) - 1)
            same = (known["id"][places] == block["id"]) & (known["check"][places] == block["check"])
            yield from zip(block[same], known[places[same]], strict=True)


class RepeatedWrites:
    """The repeats in the logs of one stream's regions, as far as they were read. Any number of threads."""

    def __init__(self) -> None:
        self._known: dict[RegionId, _Known] = {}
        self._repeats: set[Repeat] = set()
        self._lock = threading.Lock()

    def between(
        self, readers: Mapping[RegionId, StreamReader], before: Vector, after: Vector
    ) -> Mapping[RegionId, list[Repeat]]:
        """Return the repeats that a state gets with what it receives, by region, in the order of their numbers.

        Args:
            readers: readers of the regions' logs.
            before: the state's vector; it has the repeats whose writes are both within.
            after: the vector then.

        Raises:
            LogError, PositionError: a log can't be read, or was cut back.
        """
        with self._lock:
            if not all(self._continues(region, reader) for region, reader in readers.items()):
                self._known.clear()
                self._repeats.clear()
            for region, reader in readers.items():
                self._read(region, reader, behind(after, region))
            first = {region: _first_seq(reader) for region, reader in readers.items()}
            # Rows that retention has dropped can't be read.
            self._repeats = {one for one in self._repeats if one.first >= first.get(one.region, Seq(0))}
            found: dict[RegionId, list[Repeat]] = {}
            for one in sorted(self._repeats, key=lambda one: one.first):
                if one.is_within(after) and not one.is_within(before):
                    found.setdefault(one.region, []).append(one)
            return found

    def _continues(self, region: RegionId, reader: StreamReader) -> bool:
        """Return whether a log still has what was read of it."""
        known = self._known.get(region)
        if known is None:
            return True
        with suppress(LogError, TokenFromFuture):
            return known.stream == reader.stream_id and still_says(reader, known.upto, known.end)
        return False

    def _read(self, region: RegionId, reader: StreamReader, upto: Seq) -> None:
        """Read the writes of a log up to a number, and look for them in the other regions."""
        known = self._known.get(region)
        after = Seq(0) if known is None else known.upto
        if after >= upto:
            return
        if known is None:
            known = self._known[region] = _Known(reader.stream_id)
        waiting: list[tuple[int, int, int, int, int]] = []
        for group in reader.read_groups(max(after, Seq(reader.first_seq() - 1)), upto):
            wall_ns = group[0].header.hybrid_time
            for write_id, digest, ack, _ in writes_of(group):
                name = repr((write_id.session, write_id.number, write_id.key, digest)).encode()
                hashed = blake2b(name, digest_size=16).digest()
                halves = int.from_bytes(hashed[:8], "little"), int.from_bytes(hashed[8:], "little")
                waiting.append((*halves, wall_ns, ack.seqs.first, ack.seqs.last))
            if len(waiting) >= _AT_ONCE:
                self._note(region, known, waiting)
                waiting = []
        self._note(region, known, waiting)
        known.upto, known.end = upto, end_at(reader, upto)

    def _note(self, region: RegionId, known: _Known, writes: list[tuple[int, int, int, int, int]]) -> None:
        if not writes:
            return
        block = _by_id(np.array(writes, _WRITE))
        for other, theirs in self._known.items():
            if other == region:
                continue
            for new, held in theirs.find(block):
                one = (int(new["wall_ns"]), region, Seq(int(new["first"])), Seq(int(new["last"])))
                two = (int(held["wall_ns"]), other, Seq(int(held["first"])), Seq(int(held["last"])))
                (_, earlier, _, earlier_last), (_, later, first, last) = sorted((one, two))
                self._repeats.add(Repeat(later, first, last, earlier, earlier_last))
        known.add(block)


def spans_of(repeats: Iterable[Repeat]) -> list[tuple[Seq, Seq]]:
    """Return ranges `(after, upto]` that have the numbers of repeats of one region, which are in order."""
    found: list[tuple[Seq, Seq]] = []
    for one in repeats:
        if found and one.first - found[-1][1] <= _GAP:
            found[-1] = (found[-1][0], max(found[-1][1], one.last))
        else:
            found.append((Seq(one.first - 1), one.last))
    return found


def is_repeat(repeats: list[Repeat], seqs: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return which of some numbers of a region are those of its repeats, which are in order."""
    firsts, lasts = np.array([[one.first, one.last] for one in repeats], np.int64).T
    places = np.searchsorted(firsts, seqs, side="right") - 1
    found: npt.NDArray[np.bool_] = (places >= 0) & (seqs <= lasts[places.clip(min=0)])
    return found


def _by_id(writes: _Writes) -> _Writes:
    return writes[np.argsort(writes["id"], kind="stable")]


def _first_seq(reader: StreamReader) -> Seq:
    with suppress(LogError, LogTruncated):
        return reader.first_seq()
    return Seq(0)  # nothing has come yet

"""`<stream>.acks`: what followers and the object store hold of a stream, published by its shipper to its writer.

The two are processes, or threads, on one machine. The shipper writes the file whenever an
acknowledgement arrives. The writer polls it while callers wait for more than this machine.
Everything in it can be learned again, so it is never fsynced: after a power cut it may show less,
and the shipper rebuilds it from the followers' reports.

Layout, little-endian: two slots, at 0 and 8192, written in turn with one write each. The newest
valid slot counts, so a torn one costs nothing. A slot is `MILLACK` and a newline, CRC-32C of
everything that follows, u16 version, u16 entries, u64 counter, the stream's 16 bytes, i64 the
leader's own promised epoch. Then come entries, at most 64 for followers and one for the object
store, of 104 bytes each: 64 bytes of the name padded with zeros, i64 promised epoch, i64 group, i64
`persisted_upto`, i64 time of the report (nanoseconds since 1970 UTC), u8 kind (1 a follower, 2 the
object store), 7 zeros.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Final

from millstream.codec.checksums import crc32c
from millstream.errors import LogError, UsageError
from millstream.model.ids import Epoch, GroupNumber, StreamId
from millstream.model.positions import Seq
from millstream.ports import Files
from millstream.protocol.replication.ack_levels import Holding, Holdings

FOLLOWERS_MAX: Final = 64
VERSION: Final = 1
_SLOT_BYTES: Final = 8192
_MAGIC: Final = b"MILLACK\n"
_HEAD: Final = struct.Struct("<8sIHHQ16sq")
_ENTRY: Final = struct.Struct("<64sqqqqB7x")
_CHECKED_FROM: Final = 12
_FOLLOWER, _STORE = 1, 2
_TRIES: Final = 3


class AcksFile:
    """The file, for the stream's shipper: the only process that writes it.

    Args:
        path: the file's; its folder exists. Made if there is none.
        stream: the stream that the reports are about.
        promised: the leader's own epoch.

    Concurrency: one thread at a time.
    """

    def __init__(self, files: Files, path: str, stream: StreamId, promised: Epoch) -> None:
        self._stream = stream
        self._promised = promised
        data = _read(files, path)
        found = _newest(data)
        self._counter = 0 if found is None else found[0]
        # An entry of another stream, or a damaged one, doesn't count.
        known = None if found is None else _decoded(data, found, stream)
        self._places = {} if known is None else {_key(place.name, place.is_store): place for place in known.places}
        if files.exists(path):
            self._file = files.open_write(path)
        else:
            self._file = files.create(path)
        self._write()

    @property
    def holdings(self) -> Holdings:
        """Contents of the file."""
        return Holdings(self._promised, tuple(self._places.values()))

    def tell(self, holding: Holding) -> None:
        """Record what a follower, or the object store, holds now; this replaces its earlier report.

        Raises:
            UsageError: 64 other followers are known.
            OSError: the disk fails, or is full; the file is unchanged.
        """
        key = _key(holding.name, holding.is_store)
        if key and key not in self._places and sum(map(bool, self._places)) >= FOLLOWERS_MAX:
            raise UsageError(
                f"the stream has {FOLLOWERS_MAX} followers, the maximum", hint="Remove some of them first."
            )
        if self._places.get(key) != holding:
            self._places[key] = holding
            self._write()

    def take_over(self, holdings: Holdings, now_ns: int) -> None:
        """Record everything that the leader knows at a moment of its clock (nanoseconds since 1970 UTC).

        Raises as `tell`, with part of it done. Followers that aren't among the holdings are
        removed: they have lost something, or have never reported to this leader. The object store's
        entry is set once it has taken something. A place whose holding is unchanged keeps the time
        of its report.
        """
        self.promise(holdings.promised)
        followers = {place.name for place in holdings.places if not place.is_store}
        for gone in [place.name for place in self._places.values() if not place.is_store]:
            if gone not in followers:
                self.forget(gone)
        for place in holdings.places:
            known = self._places.get(_key(place.name, place.is_store))
            if known is None or replace(known, told_ns=0) != replace(place, told_ns=0):
                self.tell(replace(place, told_ns=now_ns))

    def forget(self, name: str) -> None:
        """Remove a follower's entry. Raises `OSError` as `tell`."""
        if self._places.pop(_key(name, is_store=False), None) is not None:
            self._write()

    def promise(self, epoch: Epoch) -> None:
        """Record that the leader has promised another epoch. Raises `OSError` as `tell`."""
        if epoch != self._promised:
            self._promised = epoch
            self._write()

    def close(self) -> None:
        """Close the file; its contents stay."""
        self._file.close()

    def _write(self) -> None:
        self._counter += 1
        entries = b"".join(
            _ENTRY.pack(
                place.name.encode(), place.promised, place.group, place.persisted_upto, place.told_ns,
                _STORE if place.is_store else _FOLLOWER,
            )
            for place in self._places.values()
        )  # fmt: skip
        rest = _HEAD.pack(
            _MAGIC, 0, VERSION, len(self._places), self._counter, self._stream.bytes, self._promised
        )[_CHECKED_FROM:]  # fmt: skip
        slot = _MAGIC + struct.pack("<I", crc32c(rest, entries)) + rest + entries
        self._file.pwrite(slot, _SLOT_BYTES * (self._counter % 2))


class AcksReader:
    """The file, for the writer of the stream's log; a `HighWater`.

    Args:
        path: the file's. If it doesn't exist yet, no other machine holds anything.
        stream: the log's stream. Another stream's followers don't count.
    """

    def __init__(self, files: Files, path: str, stream: StreamId) -> None:
        self._files = files
        self._path = path
        self._stream = stream
        self._data = b""
        self._known = Holdings()
        self._doubted: frozenset[Holding] = frozenset()

    def begin(self, newest: GroupNumber) -> None:
        """See `ports.HighWater`."""
        self._doubted = frozenset()
        self._doubted = frozenset(place for place in self.look().places if place.group > newest)

    def look(self) -> Holdings:
        """See `ports.HighWater`. If the file is being written, or is damaged, returns the previous contents."""
        for _ in range(_TRIES):
            data = _read(self._files, self._path)
            if data != self._data:
                found = _newest(data)
                if found is None and data:
                    continue
                holdings = None if found is None else _decoded(data, found, self._stream)
                self._data, self._known = data, holdings or Holdings()
            break
        if not self._doubted:
            return self._known
        return Holdings(
            self._known.promised, tuple(place for place in self._known.places if place not in self._doubted)
        )


def _key(name: str, is_store: bool) -> str:  # noqa: FBT001 (as the field)
    """Return the key of a place; there is one object store."""
    return "" if is_store else name


def _read(files: Files, path: str) -> bytes:
    try:
        return files.read(path, 0, 2 * _SLOT_BYTES)
    except FileNotFoundError:
        return b""


def _newest(data: bytes) -> tuple[int, int, int] | None:
    """Return counter, position and entries of the newest valid slot. Raises `LogError` if it is of a newer version."""
    best: tuple[int, int, int] | None = None
    for start in (0, _SLOT_BYTES):
        if len(data) < start + _HEAD.size:
            continue
        magic, crc, version, count, counter, _, _ = _HEAD.unpack_from(data, start)
        end = start + _HEAD.size + count * _ENTRY.size
        if magic != _MAGIC or end > min(len(data), start + _SLOT_BYTES):
            continue
        if crc != crc32c(data[start + _CHECKED_FROM : end]) or (best is not None and counter <= best[0]):
            continue
        if version != VERSION:
            raise LogError(
                f"the file of acknowledgements has version {version}, which this Millstream can't read",
                hint="Upgrade this Millstream.",
            )
        best = (counter, start, count)
    return best


def _decoded(data: bytes, found: tuple[int, int, int], stream: StreamId) -> Holdings | None:
    """Return the contents of a slot; None if it is another stream's."""
    _, start, count = found
    *_, owner, promised = _HEAD.unpack_from(data, start)
    if owner != stream.bytes:
        return None
    places = []
    for place in range(count):
        name, own, group, upto, told, kind = _ENTRY.unpack_from(data, start + _HEAD.size + place * _ENTRY.size)
        places.append(
            Holding(
                name.rstrip(b"\0").decode(errors="replace"),
                Epoch(own),
                GroupNumber(group),
                Seq(upto),
                told,
                kind == _STORE,
            )
        )
    return Holdings(Epoch(promised), tuple(places))

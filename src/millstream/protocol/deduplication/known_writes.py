"""The writes of applications that a log has: a repeated write is recognized, and answered with its first result.

Premises
--------
1. A write is identified by a session and its number in it, from 1, or by an idempotency key. The state is a function
   of the log's operations, in order: a replay from a copy of the state gives the same state.
2. Numbers of a session may come in any order (5, 7, 6): all up to its *mark* are in the log, and those above it that
   are, are known one by one. To bound these, a number more than `AHEAD_MAX` above the mark is refused until others
   have come.
3. A session keeps the results of its last `RESULTS_KEPT` writes up to the mark. An older write is known to be in the
   log, but its place isn't.
4. The session that has been idle longest is forgotten, by age or if there are too many; so is a key. Its hash is
   remembered, so that it isn't taken for a new one. In an unknown session a number above `AHEAD_MAX` can't be new
   either. At least the last `expired_max` hashes are kept: a name that is older is taken for new.
5. If the log has lost operations that the copy doesn't cover, sessions with gaps in their numbers are forgotten, too.
6. A log may lack writes that another region's has. So a write far above the mark that stands in the log shows that all
   up to `AHEAD_MAX` below it were known when it was taken. Those between may be in a log that isn't here: the session
   *begins* there, and `OtherRegions.check_begin` refuses its new writes until the logs together have all lower ones.

The answer to a write:

    | its number, or key               | same rows as then  | others               |
    |----------------------------------|--------------------|----------------------|
    | known, with its result           | answered again     | IdempotencyKeyReused |
    | known, without                   | DedupWindowExpired | DedupWindowExpired   |
    | unknown, at most AHEAD_MAX above | new                | new                  |
    | unknown, farther above           | SessionGap         | SessionGap           |
    | the same, of an unknown session  | SessionExpired     | SessionExpired       |
    | of a session that was forgotten  | SessionExpired     | SessionExpired       |
    | a key that was forgotten         | DedupWindowExpired | DedupWindowExpired   |

Sessions that were used lately are objects, others a few bytes each. A result becomes an object only when it is asked
for: the next write of one of many sessions needs only its mark.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from millstream.errors import DedupWindowExpired, IdempotencyKeyReused, SessionExpired, SessionGap
from millstream.model.ids import ShardId
from millstream.model.operations import Ack
from millstream.model.positions import Offset, Seq, SeqRange
from millstream.model.writes import NO_DIGEST, SessionFacts, WriteId

AHEAD_MAX: Final = 1024
"""How far above a session's mark a number may be: the writes that may be in flight at a time."""
RESULTS_KEPT: Final = 16
_HOT_MAX: Final = 1024
"""Number of sessions kept as objects."""
_SWEEP: Final = 256
"""Number of sessions to forget at a time: each removal from the front of a dict scans the slots of all entries removed
before it."""
_RECENT_MAX: Final = 4096
_SESSION: Final = struct.Struct("<qqH")
"""mark, last use (µs since 1970), number of results that follow."""
_RESULT: Final = struct.Struct("<qqqqB")
"""number (of a key: last use), digest, first number of its rows, row count, shard count. If the shard count is
`_MANY`, the true one follows as `_SHARDS`."""
_MANY: Final = 255
_SHARDS: Final = struct.Struct("<H")
_PLACE: Final = struct.Struct("<iqq")
_PLAIN_SIZE: Final = _RESULT.size + _PLACE.size
"""Size of a result on one shard, as most are."""
_NUMBERS: Final = struct.Struct(f"<q{_PLAIN_SIZE - 8}x")
_NUMBER: Final = struct.Struct("<q")
_NAME: Final = struct.Struct("<H")
_COUNT: Final = struct.Struct("<Q")
_HASH: Final = np.dtype("<u8")
_Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits at which sessions and keys are forgotten."""

    sessions_max: int = 1_000_000
    keys_max: int = 1_000_000
    age_us: int = 7 * 86_400_000_000
    """Age since its last write, in microseconds."""
    expired_max: int = 1 << 20
    """Least number of forgotten names that are remembered as forgotten."""


_Result: TypeAlias = tuple[int, Ack]
"""A write's digest, and its result. One is made for each noted write: a class would take as long as the rest of the
noting."""


@dataclass(slots=True)
class _SessionState:
    mark: int = 0
    used_us: int = 0
    results: dict[int, _Result | bytes] = field(default_factory=dict)
    """Results by number: all above the mark, and the last ones up to it; as bytes if they were read from bytes."""


class Sessions:
    """The state; see the module. Not thread-safe: it belongs to the log's writer."""

    def __init__(self, limits: SessionLimits | None = None) -> None:
        self.limits: Final = SessionLimits() if limits is None else limits
        self._hot: OrderedDict[str, _SessionState] = OrderedDict()
        """Sessions used lately, longest idle first."""
        self._cold: dict[str, bytes] = {}
        """Sessions used before all of those, in the same order."""
        self._keys: dict[str, bytes] = {}
        """Results by key, in the order of their writes."""
        self._begins: dict[str, int] = {}
        """Numbers of known sessions, see `begin`."""
        self._expired = _Expired(self.limits.expired_max)
        self._noted = 0
        """Number of writes noted, to look for old sessions now and then."""

    def __len__(self) -> int:
        """Return the number of sessions."""
        return len(self._hot) + len(self._cold)

    # --- looking up ------------------------------------------------------------------------------------------------

    def mark(self, session: str) -> int:
        """Return the number up to which a session's writes are known; 0 if the session is unknown."""
        found = self._hot.get(session)
        if found is not None:
            return found.mark
        packed = self._cold.get(session)
        return 0 if packed is None else int(_SESSION.unpack_from(packed)[0])

    def knows(self, session: str) -> bool:
        """Return whether a session is known, or was and is forgotten."""
        return session in self._hot or session in self._cold or _hash_of("s", session) in self._expired

    def begin(self, session: str) -> int:
        """Return the number below which a log that isn't here may have writes of a session; 0 if none may."""
        return self._begins.get(session, 0)

    def has(self, session: str, number: int) -> bool:
        """Return whether a session's write above its mark is known."""
        found = self._hot.get(session) or self._thawed(session)
        return found is not None and number in found.results

    def look(self, write_id: WriteId, digest: int, *, mark: int | None = None) -> Ack | None:
        """Return the result of an earlier write; None if it is new. Nothing changes.

        Args:
            write_id: a session with a number, or a key.
            digest: digest of its rows, at least 0.
            mark: the session's mark after the writes that are about to be noted, if there are some.

        Raises:
            IdempotencyKeyReused, DedupWindowExpired, SessionGap, SessionExpired: see the table above.
        """
        if write_id.key is not None:
            return self._look_for_key(write_id.key, digest)
        name, number = write_id.session, write_id.number
        assert name is not None
        assert number is not None
        session = self._hot.get(name)
        if session is None and (packed := self._cold.get(name)) is not None:
            if mark is None and _SESSION.unpack_from(packed)[0] == number - 1:
                return None  # the mark would be farther if it were known
            session = _unpacked(packed)
        if session is not None:
            found = session.results.get(number)
            if found is not None:
                known, given = _unpacked_result(found)[1] if isinstance(found, bytes) else found
                self.check_same(known, digest, write_id)
                return given
            if number <= session.mark:
                raise DedupWindowExpired(
                    f"write {number} of session {name} was appended, but its position is no longer known",
                    session=name,
                    number=number,
                )
            if mark is None:
                mark = session.mark
        elif (mark is None and number > AHEAD_MAX) or _hash_of("s", name) in self._expired:
            raise SessionExpired(
                f"session {name} has expired: it is unknown whether its write {number} is in the log",
                session=name,
                number=number,
            )
        elif mark is None:
            return None
        if number > mark + AHEAD_MAX:
            raise SessionGap(
                f"write {number} of session {name} came before write {mark + 1}: at most {AHEAD_MAX} may",
                session=name,
                number=number,
                mark=mark,
            )
        return None

    @staticmethod
    def check_same(known: int, digest: int, write_id: WriteId) -> None:
        """Raise `IdempotencyKeyReused` if a write's digest differs from the known digest of its id."""
        if known in (digest, NO_DIGEST) or digest == NO_DIGEST:
            return
        if write_id.key is not None:
            raise IdempotencyKeyReused(
                f"the idempotency key {write_id.key} was another write's: its rows, or their table, were others",
                idempotency_key=write_id.key,
            )
        raise IdempotencyKeyReused(
            f"write {write_id.number} of session {write_id.session} was another one: its rows, or their table, were others",
            session=write_id.session,
            number=write_id.number,
        )

    def _look_for_key(self, key: str, digest: int) -> Ack | None:
        packed = self._keys.get(key)
        if packed is not None:
            found = _unpacked_result(packed)[1]
            self.check_same(found[0], digest, WriteId(key=key))
            return found[1]
        if _hash_of("k", key) in self._expired:
            raise DedupWindowExpired(
                f"a write with the idempotency key {key} was appended, but its position is no longer known",
                idempotency_key=key,
            )
        return None

    def facts(self, name: str) -> SessionFacts:
        """Return the facts of a session."""
        session = self._hot.get(name) or self._thawed(name)
        if session is None:
            return SessionFacts(0, expired=_hash_of("s", name) in self._expired)
        return SessionFacts(session.mark, tuple(sorted(number for number in session.results if number > session.mark)))

    # --- noting ----------------------------------------------------------------------------------------------------

    def note(self, write_id: WriteId, digest: int, given: Ack, now_us: int) -> None:
        """Note a write that has become durable.

        Args:
            write_id: a session with a number, or a key.
            digest: digest of its rows; `NO_DIGEST` if they weren't summed.
            given: its numbers and offsets.
            now_us: time of the write, in microseconds since 1970.
        """
        self._noted += 1
        name, number = write_id.session, write_id.number
        if name is None or number is None:
            self._note_key(write_id, (digest, given), now_us)
            return
        session = self._hot.get(name)
        if session is None:
            session = self._heated(name, now_us)
            if session is None:
                return
        else:
            self._hot.move_to_end(name)
        mark = session.mark
        if number > mark + AHEAD_MAX:
            # The writes this far below were known when it was taken: from a part of the log that is gone now, or from
            # another region's log.
            mark = number - AHEAD_MAX
            self.raise_mark(name, mark, now_us)
            self._begins[name] = number
        session.used_us = max(session.used_us, now_us)
        results = session.results
        results[number] = digest, given
        while mark + 1 in results:
            mark += 1
            results.pop(mark - RESULTS_KEPT, None)
        session.mark = mark
        if self._begins and self._begins.get(name, mark + 2) <= mark + 1:
            del self._begins[name]

    def note_begin(self, session: str, number: int) -> None:
        """Note the first number of a session that isn't known yet, before its write: a log's lost part may have lower ones."""
        if number > 1 and not self.knows(session):
            self._begins[session] = number

    def raise_mark(self, name: str, mark: int, now_us: int) -> None:
        """Count a session's writes up to a number as known: another region's log has them."""
        session = self._hot.get(name) or self._heated(name, now_us)
        if session is not None and mark > session.mark:
            session.mark = mark
            for number in [number for number in session.results if number <= mark - RESULTS_KEPT]:
                del session.results[number]

    def _note_key(self, write_id: WriteId, result: _Result, now_us: int) -> None:
        assert write_id.key is not None
        self._keys.pop(write_id.key, None)
        self._keys[write_id.key] = _packed_result(now_us, result)
        self._forget_keys(now_us)

    def _heated(self, name: str, now_us: int) -> _SessionState | None:
        """Return a session as an object, a new one if it is unknown.

        None if it was forgotten after its write was looked up.
        """
        session = self._thawed(name)
        if session is None:
            if _hash_of("s", name) in self._expired:
                return None
            session = _SessionState()
        self._cold.pop(name, None)
        self._hot[name] = session
        if len(self._hot) > _HOT_MAX:
            longest, idle = self._hot.popitem(last=False)
            self._cold[longest] = _packed(idle)
        self._forget_sessions(now_us)
        return session

    def forget_gaps(self) -> None:
        """Forget sessions that lack numbers below others, because some operations can no longer be noted.

        No one could tell which of these writes are in the log. A session that went on would come too far ahead of
        numbers that never come again.
        """
        whole = self._cold | {name: _packed(session) for name, session in self._hot.items()}
        for name in [name for name, packed in whole.items() if _lacks_some(_unpacked(packed))]:
            self._forget_session(name)

    def _forget_session(self, name: str) -> None:
        self._hot.pop(name, None)
        self._cold.pop(name, None)
        self._begins.pop(name, None)
        self._expired.add(_hash_of("s", name))

    def _thawed(self, name: str) -> _SessionState | None:
        packed = self._cold.get(name)
        return None if packed is None else _unpacked(packed)

    def _forget_sessions(self, now_us: int) -> None:
        limit = now_us - self.limits.age_us
        excess = len(self) - self.limits.sessions_max
        if excess <= _slack(self.limits.sessions_max) and self._noted % _SWEEP:
            return
        gone: list[str] = []
        for name, packed in islice(self._cold.items(), 4 * _SWEEP):
            if excess <= len(gone) and _SESSION.unpack_from(packed)[1] >= limit:
                break
            gone.append(name)
        for name in gone:
            self._forget_session(name)
        while self._hot and not self._cold:
            name, oldest = next(iter(self._hot.items()))
            if oldest.used_us >= limit and len(self._hot) <= self.limits.sessions_max:
                return
            if len(self._hot) == 1:
                return  # the session in use
            self._forget_session(name)

    def _forget_keys(self, now_us: int) -> None:
        limit = now_us - self.limits.age_us
        excess = len(self._keys) - self.limits.keys_max
        if excess <= _slack(self.limits.keys_max) and self._noted % _SWEEP:
            return
        gone: list[str] = []
        for key, packed in islice(self._keys.items(), 4 * _SWEEP):
            if excess <= len(gone) and _RESULT.unpack_from(packed)[0] >= limit:
                break
            gone.append(key)
        for key in gone:
            del self._keys[key]
            self._expired.add(_hash_of("k", key))

    # --- a copy ----------------------------------------------------------------------------------------------------

    def copied(self) -> Callable[[], Iterator[bytes]]:
        """Return the present state, in pieces of bytes that `restored` takes joined.

        Copying takes some tens of milliseconds with a million sessions. The call makes the pieces, on any thread,
        which takes some more.
        """
        sessions = {**self._cold, **{name: _packed(session) for name, session in self._hot.items()}}
        keys, expired = dict(self._keys), self._expired.copied()
        begins = {name: _NUMBER.pack(number) for name, number in self._begins.items()}

        def pieces() -> Iterator[bytes]:
            yield from _entries(sessions)
            yield from _entries(keys)
            yield from expired
            if begins:
                yield from _entries(begins)

        return pieces

    @classmethod
    def restored(cls, data: bytes, limits: SessionLimits | None = None) -> Sessions:
        """Return the state of a copy. Raises `ValueError` if the bytes aren't one."""
        sessions = cls(limits)
        try:
            at = 0
            sessions._cold, at = _read_entries(data, at, _size_of_session)
            sessions._keys, at = _read_entries(data, at, _size_of_result)
            at = sessions._expired.restore(data, at)
            if at < len(data):
                begins, at = _read_entries(data, at, lambda *_: _NUMBER.size)
                sessions._begins = {name: _NUMBER.unpack(packed)[0] for name, packed in begins.items()}
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise ValueError(f"the copy can't be read: {error}") from error
        if at != len(data):
            raise ValueError(f"the copy has {len(data)} bytes, {at} of them make sense")
        return sessions


def _lacks_some(session: _SessionState) -> bool:
    return any(number > session.mark for number in session.results)


def _slack(limit: int) -> int:
    """Return how many there may be above a limit until all of them are forgotten together."""
    return min(_SWEEP, limit // 16)


def _hash_of(kind: str, name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8, person=kind.encode()).digest(), "little")


class _Expired:
    """Hashes of forgotten names: at least the last `least`, at eight bytes each."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._recent: set[int] = set()
        self._newer: _Hashes = np.empty(0, _HASH)
        self._older: _Hashes = np.empty(0, _HASH)
        """Both arrays are sorted."""

    def __contains__(self, wanted: int) -> bool:
        return wanted in self._recent or _holds(self._newer, wanted) or _holds(self._older, wanted)

    def add(self, found: int) -> None:
        """Remember one more hash."""
        self._recent.add(found)
        if len(self._recent) < _RECENT_MAX:
            return
        self._newer = np.union1d(self._newer, np.fromiter(self._recent, _HASH))
        self._recent = set()
        if len(self._newer) >= self._least:
            self._older, self._newer = self._newer, np.empty(0, _HASH)

    def copied(self) -> list[bytes]:
        """Return pieces of bytes for `restore`."""
        parts = (self._older, self._newer, np.sort(np.fromiter(self._recent, _HASH)))
        return [piece for part in parts for piece in (struct.pack("<Q", len(part)), part.tobytes())]

    def restore(self, data: bytes, at: int) -> int:
        """Take the pieces that begin there; return where they end."""
        parts = []
        for _ in range(3):
            (count,) = struct.unpack_from("<Q", data, at)
            at += 8
            if count > (len(data) - at) // 8:
                raise ValueError("hashes are missing")
            parts.append(np.frombuffer(data, _HASH, count, at).copy())
            at += 8 * count
        self._older, self._newer = parts[0], parts[1]
        self._recent = set(parts[2].tolist())
        return at


def _holds(hashes: _Hashes, wanted: int) -> bool:
    at = int(np.searchsorted(hashes, np.uint64(wanted)))
    return at < len(hashes) and int(hashes[at]) == wanted


# --- bytes ---------------------------------------------------------------------------------------------------------


def _entries(told: dict[str, bytes]) -> Iterator[bytes]:
    yield _COUNT.pack(len(told))
    entries = iter(told.items())
    while piece := b"".join(_entry(name, packed) for name, packed in islice(entries, 4096)):
        yield piece


def _entry(name: str, packed: bytes) -> bytes:
    encoded = name.encode()
    return _NAME.pack(len(encoded)) + encoded + packed


def _read_entries(data: bytes, at: int, size_of: Callable[[bytes, int], int]) -> tuple[dict[str, bytes], int]:
    """Return the entries that begin there, and where they end."""
    told: dict[str, bytes] = {}
    (count,) = _COUNT.unpack_from(data, at)
    at += _COUNT.size
    for _ in range(count):
        (length,) = _NAME.unpack_from(data, at)
        at += _NAME.size
        name = data[at : at + length].decode()
        at += length
        size = size_of(data, at)
        told[name] = data[at : at + size]
        at += size
    return told, at


def _packed(session: _SessionState) -> bytes:
    return b"".join(
        [
            _SESSION.pack(session.mark, session.used_us, len(session.results)),
            *(
                result if isinstance(result, bytes) else _packed_result(number, result)
                for number, result in session.results.items()
            ),
        ]
    )


def _unpacked(packed: bytes) -> _SessionState:
    mark, used_us, count = _SESSION.unpack_from(packed)
    results: dict[int, _Result | bytes] = {}
    at = _SESSION.size
    if _are_plain(packed, at, count):
        for (number,) in _NUMBERS.iter_unpack(packed[at:]):
            results[number] = packed[at : at + _PLAIN_SIZE]
            at += _PLAIN_SIZE
    else:
        for _ in range(count):
            (number,) = _NUMBER.unpack_from(packed, at)
            end = at + _size_of_result(packed, at)
            results[number] = packed[at:end]
            at = end
    return _SessionState(mark, used_us, results)


def _are_plain(data: bytes, at: int, count: int) -> bool:
    """Return whether each of `count` results that begin there lies on one shard: then they have one size."""
    return data[at + _RESULT.size - 1 : at + count * _PLAIN_SIZE : _PLAIN_SIZE] == b"\x01" * count


def _packed_result(number: int, result: _Result) -> bytes:
    digest, given = result
    shards = len(given.offsets)
    head = _RESULT.pack(number, digest, given.seqs.first, given.seqs.count, min(shards, _MANY))
    places = (_PLACE.pack(shard, start, end) for shard, (start, end) in given.offsets.items())
    return b"".join([head, _SHARDS.pack(shards) if shards >= _MANY else b"", *places])


def _unpacked_result(packed: bytes) -> tuple[int, _Result]:
    number, digest, first, count, _ = _RESULT.unpack_from(packed)
    places_at, end = _places_of_result(packed, 0)
    places = (_PLACE.unpack_from(packed, place) for place in range(places_at, end, _PLACE.size))
    offsets = {ShardId(shard): (Offset(start), Offset(end)) for shard, start, end in places}
    return number, (digest, Ack(offsets, SeqRange(Seq(first), count)))


def _places_of_result(data: bytes, at: int) -> tuple[int, int]:
    """Return where a result's places begin, and where it ends."""
    shards = int(_RESULT.unpack_from(data, at)[4])
    at += _RESULT.size
    if shards == _MANY:
        (shards,) = _SHARDS.unpack_from(data, at)
        at += _SHARDS.size
    return at, at + shards * _PLACE.size


def _size_of_result(data: bytes, at: int) -> int:
    return _places_of_result(data, at)[1] - at


def _size_of_session(data: bytes, at: int) -> int:
    size, count = _SESSION.size, int(_SESSION.unpack_from(data, at)[2])
    if _are_plain(data, at + size, count):
        return size + count * _PLAIN_SIZE
    for _ in range(count):
        size += _size_of_result(data, at + size)
    return size

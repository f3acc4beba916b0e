"""The durable state of a stream's consumers: a log of changes, and a key that signs the ids of deliveries.

`consumers.log` begins with `MAGIC`. Frames follow: the length and the CRC32C of a JSON value (u32, little-endian each),
and the value. A value is one entry:

- `["create", name, facts]`: a consumer with its definition, its incarnation, its state and its dead letters' records.
- `["change", name, changes, records]`: changes of its state, with the records of messages that died.
- `["remove", name]`.

An entry is written when it is made, so that a killed process loses none; `sync` makes it durable. `compact` replaces
the file by one with an entry for each consumer.
"""

from __future__ import annotations

import errno
import json
import secrets
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import structlog

from millstream.codec.checksums import crc32c
from millstream.delivery.definition import Definition
from millstream.errors import DeliveryError, WriterClosed
from millstream.private_files import make_folder, replace_file
from millstream.protocol.delivery import Change, Died, Dropped, State, decode, encode
from millstream.wal.files import RealFile, RealFiles, as_told

logger = structlog.get_logger("millstream.delivery")

MAGIC: Final = b"MSTCONS1"
LOG_NAME: Final = "consumers.log"
KEY_NAME: Final = "key"
_KEY_BYTES: Final = 32
_FRAME: Final = struct.Struct("<II")
_COMPACTED_BYTES_MIN: Final = 1 << 20
_GROWTH: Final = 4
"""The log is compacted once it is so many times as large as after the last compaction."""

Letter = list[Any]
"""A dead letter's group and its record as JSON text."""


@dataclass(slots=True)
class Stored:
    """A consumer as the store has it."""

    definition: Definition
    incarnation: str
    """Hex digits that no other consumer has, not even a later one of its name."""
    state: State
    letters: dict[str, Letter] = field(default_factory=dict)
    """Dead and retried messages' groups and records, by id."""

    def to_json(self) -> dict[str, Any]:
        """Return a value that JSON can hold."""
        return {
            "definition": self.definition.as_dict(),
            "incarnation": self.incarnation,
            "state": self.state.to_json(),
            "letters": self.letters,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Stored:
        """Return the consumer of `to_json`'s value."""
        state = State.from_json(value["state"])
        return cls(Definition.parse(value["definition"]), value["incarnation"], state, value["letters"])

    def apply(self, changes: Iterable[Change], letters: Mapping[str, Letter]) -> None:
        """Apply changes of the machine."""
        self.letters.update(letters)
        for change in changes:
            self.state.apply(change)
            if isinstance(change, Dropped):
                for id_ in change.ids:
                    self.letters.pop(id_, None)


class Store:
    """The log and the key of one stream's consumers. `open` makes one.

    Concurrency: the caller serialises.
    """

    def __init__(self, folder: Path, key: bytes, file: RealFile, size: int, base: int) -> None:
        self._folder = folder
        self.key: Final = key
        self._file = file
        self._size = size
        self._base = base
        """Size of the log after the last compaction."""
        self._is_dirty = self._is_closed = False
        self._is_incomplete = False
        """Whether a write or an fsync failed: an entry may be missing, and another fsync would not tell."""

    @classmethod
    def open(cls, folder: Path) -> tuple[Store, dict[str, Stored]]:
        """Open the store in a folder, which is made if it isn't there.

        Returns:
            The store, and the consumers by name.

        Raises:
            DeliveryError (`consumer_state_unreadable`): the log isn't one, or has entries that can't be read.
            MillstreamError (`io_failed` …): the disk fails.
        """
        files, path, key_file = RealFiles(), folder / LOG_NAME, folder / KEY_NAME
        try:
            make_folder(folder)
            if not path.exists():
                # A lost log with its key would accept the acknowledgements of consumers that are gone.
                replace_file(key_file, secrets.token_bytes(_KEY_BYTES))
                replace_file(path, MAGIC)
            key, data = key_file.read_bytes(), path.read_bytes()
        except OSError as error:
            raise as_told(error) from error
        if len(key) != _KEY_BYTES or not data.startswith(MAGIC):
            raise _unreadable(path if len(key) == _KEY_BYTES else key_file, "it isn't one of this version")
        consumers: dict[str, Stored] = {}
        entries, end = _entries(data)
        for entry in entries:
            try:
                _apply(consumers, entry)
            except (KeyError, TypeError, ValueError, IndexError, DeliveryError) as error:
                raise _unreadable(path, f"an entry is invalid ({error})") from error
        if end < len(data):
            logger.warning("the end of the consumers' log is torn", file=str(path), bytes=len(data) - end)
        try:
            file = files.open_write(str(path))
            file.truncate(end)
        except OSError as error:
            raise as_told(error) from error
        return cls(folder, key, file, end, end), consumers

    def create(self, stored: Stored) -> None:
        """Note a new consumer, durably."""
        self._append(["create", stored.definition.name, stored.to_json()])
        self.sync()

    def remove(self, name: str) -> None:
        """Forget a consumer, durably."""
        self._append(["remove", name])
        self.sync()

    def change(self, name: str, changes: Iterable[Change], letters: Mapping[str, Letter]) -> None:
        """Note changes of a consumer's state. `sync` makes them durable."""
        self._append(["change", name, [encode(change) for change in changes], letters])

    def sync(self) -> None:
        """Make everything durable that was noted.

        Raises:
            MillstreamError (`io_failed` …): the disk fails, or did so since the last `compact`, which mends it.
        """
        if self._is_incomplete:
            raise as_told(OSError(errno.EIO, "an earlier write failed", str(self._folder / LOG_NAME)))
        if self._is_dirty:
            try:
                self._file.sync()
            except OSError as error:
                self._is_incomplete = True
                raise as_told(error) from error
            self._is_dirty = False

    @property
    def wants_compaction(self) -> bool:
        """Whether most of the log is history, or an entry may be missing."""
        return self._is_incomplete or self._size > max(_COMPACTED_BYTES_MIN, _GROWTH * self._base)

    def compact(self, consumers: Iterable[Stored]) -> None:
        """Replace the log by the present state of all consumers, durably."""
        entries = [["create", stored.definition.name, stored.to_json()] for stored in consumers]
        data = MAGIC + b"".join(map(_frame, entries))
        path = self._folder / LOG_NAME
        try:
            replace_file(path, data)
            file = RealFiles().open_write(str(path))
        except OSError as error:
            raise as_told(error) from error
        self._file.close()
        self._file, self._size, self._base = file, len(data), len(data)
        self._is_dirty = self._is_incomplete = False

    def close(self) -> None:
        """Make everything durable, and close the log."""
        self._is_closed = True
        try:
            self.sync()
        finally:
            self._file.close()

    def _append(self, entry: list[Any]) -> None:
        if self._is_closed:
            raise WriterClosed("this process has given the consumers up")
        data = _frame(entry)
        try:
            self._file.pwrite(data, self._size)
        except OSError as error:
            self._is_incomplete = True
            raise as_told(error) from error
        self._size += len(data)
        self._is_dirty = True


def _apply(consumers: dict[str, Stored], entry: list[Any]) -> None:
    kind, name = entry[0], entry[1]
    if kind == "create":
        consumers[name] = Stored.from_json(entry[2])
    elif kind == "remove":
        del consumers[name]
    elif kind == "change":
        consumers[name].apply([decode(change) for change in entry[2]], entry[3])
    else:
        raise ValueError(f"its kind is {kind!r}")


def _frame(entry: list[Any]) -> bytes:
    data = json.dumps(entry, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass")
    return _FRAME.pack(len(data), crc32c(data)) + data


def _entries(data: bytes) -> tuple[list[list[Any]], int]:
    """Return the whole entries from the beginning, and the end of the last one."""
    found, at = [], len(MAGIC)
    while at + _FRAME.size <= len(data):
        length, checksum = _FRAME.unpack_from(data, at)
        body = data[at + _FRAME.size : at + _FRAME.size + length]
        if not length or len(body) < length or crc32c(body) != checksum:  # a power cut may leave zeros at the end
            break
        found.append(json.loads(body.decode(errors="surrogatepass")))
        at += _FRAME.size + length
    return found, at


def _unreadable(path: Path, why: str) -> DeliveryError:
    return DeliveryError(
        f"the consumers' state in {path} can't be read: {why}", code="consumer_state_unreadable", file=str(path)
    )


def died_letters(changes: Iterable[Change]) -> dict[str, Letter]:
    """Return the records of the messages that died, by id."""
    found: dict[str, Letter] = {}
    for change in changes:
        if isinstance(change, Died) and change.letter.message.origin is not None:
            origin = change.letter.message.origin
            found[change.letter.message.id] = [origin.group, origin.record]
    return found

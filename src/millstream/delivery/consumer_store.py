"""The durable state of a stream's consumers: a log of changes, and a key that signs the ids of deliveries.

`consumers.log` has the format of `delivery.consumers_log_format`. A value is one entry:

- `["create", name, facts]`: a consumer with its definition, its incarnation, its state and its dead letters' records.
- `["change", name, changes, records]`: changes of its state, with the records of messages that died.
- `["remove", name]`.
- `["backfill", name, facts, ended, counters]`: a backfill began, has its rows now, or ended (`facts` is null); with the
  backfills that ended before, and what it adds to the consumer's counters.
- `["rows", name, changes]`: changes of a backfill's state.

An entry is written when it is made, so that a killed process loses none; `sync` makes it durable. `compact` replaces
the file by one with an entry for each consumer.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import structlog

from millstream.delivery.backfill.running_backfill import ENDED_MAX, Ended, StoredBackfill
from millstream.delivery.consumers_log_format import MARK_AT, Contents, Entry, frame, log_of, mark, parse
from millstream.delivery.definition import Definition, selection_of
from millstream.delivery.records.record_messages import record_of
from millstream.delivery.records.record_reader import Earlier
from millstream.errors import DeliveryError, WriterClosed
from millstream.private_files import make_folder, replace_file
from millstream.protocol.delivery import Change, Died, Dropped, Message, Rewound, State, decode, encode
from millstream.wal.files import RealFile, RealFiles, check_is_at, error_of_os

logger = structlog.get_logger("millstream.delivery")

LOG_NAME: Final = "consumers.log"
KEY_NAME: Final = "key"
KEY_BYTES: Final = 32
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
    bounds: list[list[int]] = field(default_factory=list)
    """Pairs of a run and a position: deliveries of earlier runs of messages behind the position count no longer, since
    the log behind it was lost in a promotion, and other records may have its numbers."""
    earlier: list[Earlier] = field(default_factory=list)
    """Earlier selections, by which messages that were delivered are still counted, the oldest first."""
    is_configured: bool = False
    """Whether the consumer was in `millstream.toml` when its state was opened last, or has been paused since it isn't."""
    is_paused_by_removal: bool = False
    """Whether the consumer is paused only because it isn't in the file any longer."""
    backfill: StoredBackfill | None = None
    """The backfill that runs."""
    ended: list[Ended] = field(default_factory=list)
    """Backfills that ended, the oldest first."""

    def to_json(self) -> dict[str, Any]:
        """Return a value that JSON can hold."""
        return {
            "definition": self.definition.as_dict(masked=False),
            "incarnation": self.incarnation,
            "state": self.state.to_json(),
            "letters": self.letters,
            "bounds": self.bounds,
            "earlier": self.earlier,
            "configured": [self.is_configured, self.is_paused_by_removal],
            "backfill": None if self.backfill is None else self.backfill.to_json(),
            "ended": _ended_facts(self.ended),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Stored:
        """Return the consumer of `to_json`'s value."""
        state = State.from_json(value["state"])
        definition = Definition.parse(value["definition"], is_trusted=True)
        earlier = [Earlier(upto, known, selection_of(fields)) for upto, known, fields in value.get("earlier", ())]
        is_configured, is_paused_by_removal = value.get("configured", (False, False))
        backfill, ended = value.get("backfill"), [Ended(*one) for one in value.get("ended", ())]
        return cls(
            definition,
            value["incarnation"],
            state,
            value["letters"],
            value["bounds"],
            earlier,
            is_configured,
            is_paused_by_removal,
            None if backfill is None else StoredBackfill.from_json(backfill),
            ended,
        )

    def apply(self, changes: Iterable[Change], letters: Mapping[str, Letter]) -> None:
        """Apply changes of the machine."""
        self.letters.update(letters)
        for change in changes:
            self.state.apply(change)
            if isinstance(change, Rewound):
                self.earlier = []
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
        self._is_dirty, self._is_closed = True, False  # a process that was killed may not have made the end durable
        self._has_removed = False
        """Whether the log still has a removed consumer, with its dead letters and its sink's secrets."""
        self._failure: OSError | None = None
        """The write or fsync that failed: an entry may be missing, and another fsync would not tell. No entry follows until
        `compact`: the machine's later changes build on the missing one."""

    @classmethod
    def open(cls, folder: Path) -> tuple[Store, dict[str, Stored]]:
        """Open the store in a folder, which is made if it isn't there.

        Returns:
            The store, and the consumers by name.

        Raises:
            DeliveryError (`consumer_state_unreadable`): the log isn't one, or has entries that can't be read.
            MillstreamError (`io_failed` …): the disk fails.
        """
        path, key_file = folder / LOG_NAME, folder / KEY_NAME
        try:
            make_folder(folder)
            if not path.exists():
                put_consumers(folder, None, ())
            key, data = key_file.read_bytes(), path.read_bytes()
        except OSError as error:
            raise error_of_os(error) from error
        if len(key) != KEY_BYTES:
            raise _unreadable(key_file, "it isn't one of this version")
        contents, consumers = read_consumers(path, data)
        if contents.end < contents.size:
            torn = contents.size - contents.end
            logger.warning("the end of the consumers' log is torn", file=str(path), bytes=torn)
        try:
            file = RealFiles().open_write(str(path))
            file.truncate(contents.end)
        except OSError as error:
            raise error_of_os(error) from error
        store = cls(folder, key, file, contents.end, contents.end)
        store._has_removed = any(entry[0] == "remove" for entry in contents.entries)
        return store, consumers

    def create(self, stored: Stored) -> None:
        """Note a new consumer, or another definition of one, durably."""
        self._append(["create", stored.definition.name, stored.to_json()])
        self.sync()

    def remove(self, name: str) -> None:
        """Forget a consumer, durably. The log has its dead letters until `compact`."""
        self._has_removed = True
        self._append(["remove", name])
        self.sync()

    def change(self, name: str, changes: Iterable[Change], letters: Mapping[str, Letter]) -> None:
        """Note changes of a consumer's state. `sync` makes them durable."""
        self._append(["change", name, [encode(change) for change in changes], letters])

    def set_backfill(
        self, name: str, backfill: StoredBackfill | None, ended: Sequence[Ended], counters: Sequence[int] = (0, 0, 0)
    ) -> None:
        """Note a consumer's backfill, or that none runs any longer, durably.

        Args:
            name: the consumer.
            backfill: the backfill; None: none runs.
            ended: those that ended, the oldest first.
            counters: first deliveries, further ones and acks, to be added to the consumer's.
        """
        facts = None if backfill is None else backfill.to_json()
        self._append(["backfill", name, facts, _ended_facts(ended[-ENDED_MAX:]), list(counters)])
        self.sync()

    def change_rows(self, name: str, changes: Iterable[Change]) -> None:
        """Note changes of the state of a consumer's backfill. `sync` makes them durable."""
        self._append(["rows", name, [encode(change) for change in changes]])

    def sync(self) -> None:
        """Make everything durable that was noted.

        Raises:
            MillstreamError (`disk_full`, `io_failed` …): the disk fails, or did so since the last `compact`, which mends it.
            DeliveryError (`consumer_state_missing`): as `check`.
        """
        if self._failure is not None or self._is_dirty:
            self.check()
        if self._is_dirty:
            try:
                self._file.sync()
            except OSError as error:
                self._failure = error
                raise error_of_os(error) from error
            self._is_dirty = False
            with suppress(OSError):  # an older mark is true, too
                self._file.pwrite(mark(self._size), MARK_AT)

    def check(self) -> None:
        """Raise if nothing can be noted.

        Raises:
            DeliveryError (`consumer_state_missing`): the log was moved, removed or replaced.
            MillstreamError (`disk_full`, `io_failed` …): a write or an fsync has failed since the last `compact`.
        """
        self._check_place()
        if isinstance(failure := self._failure, FileNotFoundError):
            raise missing_state(str(self._folder / LOG_NAME)) from failure
        if failure is not None:
            reason = f"an earlier write failed: {failure.strerror or failure}"
            raise error_of_os(OSError(failure.errno or errno.EIO, reason, str(self._folder / LOG_NAME))) from failure

    def _check_place(self) -> None:
        path = str(self._folder / LOG_NAME)
        try:
            check_is_at(self._file, path)
        except FileNotFoundError as error:
            raise missing_state(path) from error
        except OSError as error:
            raise error_of_os(error) from error

    @property
    def wants_compaction(self) -> bool:
        """Whether most of the log is history, it has a removed consumer, or an entry may be missing."""
        is_due = self._failure is not None or self._has_removed
        return is_due or self._size > max(_COMPACTED_BYTES_MIN, _GROWTH * self._base)

    def compact(self, consumers: Iterable[Stored]) -> None:
        """Replace the log by the present state of all consumers, durably."""
        path = self._folder / LOG_NAME
        data = _log_of(consumers)
        self._check_place()  # else a promotion has replaced the state
        try:
            replace_file(path, data)
            file = RealFiles().open_write(str(path))
        except OSError as error:
            raise error_of_os(error) from error
        self._file.close()
        self._file, self._size, self._base = file, len(data), len(data)
        self._is_dirty, self._has_removed, self._failure = False, False, None

    def close(self) -> None:
        """Make everything durable, and close the log."""
        self._is_closed = True
        try:
            self.sync()
        finally:
            self._file.close()

    def _append(self, entry: Entry) -> None:
        if self._is_closed:
            raise WriterClosed("this process has given the consumers up")
        try:
            self.check()
        except DeliveryError:
            self._failure = self._failure or FileNotFoundError(errno.ENOENT, "the file was missing")
            raise
        data = frame(entry)
        try:
            self._file.pwrite(data, self._size)
        except OSError as error:
            self._failure = error
            raise error_of_os(error) from error
        self._size += len(data)
        self._is_dirty = True


def _apply(consumers: dict[str, Stored], entry: Entry) -> None:
    kind, name = entry[0], entry[1]
    if kind == "create":
        consumers[name] = Stored.from_json(entry[2])
    elif kind == "remove":
        del consumers[name]
    elif kind == "change":
        consumers[name].apply([decode(change) for change in entry[2]], entry[3])
    elif kind == "backfill":
        stored, counters = consumers[name], consumers[name].state.counters
        stored.backfill = None if entry[2] is None else StoredBackfill.from_json(entry[2])
        stored.ended = [Ended(*one) for one in entry[3]]
        delivered, redelivered, acked = entry[4]
        counters.delivered += delivered
        counters.redelivered += redelivered
        counters.acked += acked
    elif kind == "rows":
        backfill = consumers[name].backfill
        if backfill is None:
            raise ValueError("no backfill runs")
        for change in entry[2]:
            backfill.state.apply(decode(change))
    else:
        raise ValueError(f"its kind is {kind!r}")


def read_consumers(file: Path, data: bytes) -> tuple[Contents, dict[str, Stored]]:
    """Return a log's readable part, and its consumers by name.

    Raises:
        DeliveryError (`consumer_state_unreadable`): the log isn't one, is damaged, or has entries that can't be read.
    """
    try:
        contents = parse(data)
    except ValueError as error:
        raise _unreadable(file, str(error)) from error
    if contents.is_damaged:
        raise _unreadable(
            file, f"{contents.durable - contents.end} bytes that were durable are damaged from byte {contents.end} on"
        )
    return contents, consumers_of(file, contents.entries)


def consumers_of(file: Path, entries: Iterable[Entry]) -> dict[str, Stored]:
    """Return the consumers of a log's entries, by name. Raises `consumer_state_unreadable` if an entry is invalid."""
    consumers, _, error = valid_consumers(entries)
    if error is not None:
        raise _unreadable(file, f"an entry is invalid ({error})") from error
    return consumers


def valid_consumers(entries: Iterable[Entry]) -> tuple[dict[str, Stored], int, Exception | None]:
    """Return the consumers by name, the number of entries before the first invalid one, and its error; None if all are valid."""
    consumers: dict[str, Stored] = {}
    count = 0
    for entry in entries:
        try:
            _apply(consumers, entry)
        except (KeyError, TypeError, ValueError, IndexError, DeliveryError) as error:
            return consumers, count, error
        count += 1
    return consumers, count, None


def put_consumers(folder: Path, key: bytes | None, consumers: Iterable[Stored]) -> None:
    """Replace the state in a folder that exists; no process has it open.

    Args:
        folder: the folder.
        key: the key that signs the ids of deliveries; None: a new one.
        consumers: all consumers.

    Raises:
        OSError: the disk is full, or fails.
    """
    # The log comes last: a lost log with its key would accept the acknowledgements of consumers that are gone.
    replace_file(folder / KEY_NAME, secrets.token_bytes(KEY_BYTES) if key is None else key)
    replace_file(folder / LOG_NAME, _log_of(consumers))


def _ended_facts(ended: Sequence[Ended]) -> list[list[Any]]:
    return [[one.number, one.is_rewound, one.key, one.failure] for one in ended]


def _log_of(consumers: Iterable[Stored]) -> bytes:
    return log_of(["create", stored.definition.name, stored.to_json()] for stored in consumers)


def missing_state(file: str) -> DeliveryError:
    """Return the error for a log of consumers' state that was moved, removed or replaced."""
    return DeliveryError(
        f"the consumers' state in {file} was moved, removed or replaced while the home has consumers",
        code="consumer_state_missing",
        file=file,
    )


def _unreadable(path: Path, why: str) -> DeliveryError:
    return DeliveryError(
        f"the consumers' state in {path} can't be read: {why}", code="consumer_state_unreadable", file=str(path)
    )


def died_letters(changes: Iterable[Change]) -> dict[str, Letter]:
    """Return the records of the messages that died, by id."""
    return letters_of(change.letter.message for change in changes if isinstance(change, Died))


def letters_of(messages: Iterable[Message]) -> dict[str, Letter]:
    """Return messages' groups and records, by id, as far as the messages have them."""
    origins = {message.id: message.origin for message in messages if message.origin is not None}
    return {id_: [origin.group, record_of(origin)] for id_, origin in origins.items()}

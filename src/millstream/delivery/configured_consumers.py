"""Consumers of `millstream.toml`: how a change of the file changes a consumer that exists.

A record that was delivered under an earlier definition keeps it until it is settled: it is the same message, under the
same position. The next records are those behind the last one that was delivered or settled.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import structlog

from millstream.delivery.consumer_store import LOG_NAME, Stored, read_consumers
from millstream.delivery.definition import Definition
from millstream.delivery.records.record_reader import Earlier
from millstream.errors import CursorExpired, DeliveryError, LogError, MillstreamError
from millstream.model.ids import TableId
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema
from millstream.protocol.delivery import Phase, seq_of
from millstream.wal.files import error_of_os
from millstream.wal.reader import StreamReader

logger = structlog.get_logger("millstream.delivery")

_FIXED: Final = ("kind", "group_by")


class Conflict(NamedTuple):
    """A field that can't change."""

    field: str
    problem: str


def conflict_of(old: Definition, new: Definition) -> Conflict | None:
    """Return why a consumer can't take a new definition; None if it can."""
    for field in _FIXED:
        if getattr(old, field) != getattr(new, field):
            shown = old.as_dict()[field]
            return Conflict(
                field,
                f"can't change: consumer {old.name} has {shown!r}. Make another consumer for it, under another name, and "
                f"remove this one by `millstream consumer rm {old.name}` once it isn't in the file",
            )
    return None


def conflicts_of(folder: Path, configured: Mapping[str, Definition]) -> list[tuple[str, Conflict]]:
    """Return the consumers in a folder of state, which may be in use, that can't take their definition.

    Raises:
        DeliveryError (`consumer_state_unreadable`): as `Store.open`.
        MillstreamError (`io_failed` …): the disk fails.
    """
    path = folder / LOG_NAME
    try:
        stored = read_consumers(path, path.read_bytes())[1] if configured else {}
    except FileNotFoundError:
        return []
    except OSError as error:
        raise error_of_os(error) from error
    found = []
    for name, definition in configured.items():
        conflict = conflict_of(stored[name].definition, definition) if name in stored else None
        if conflict is not None:
            found.append((name, conflict))
    return found


class FileConsumers:
    """The consumers of a stream that are in `millstream.toml`.

    Args:
        stream: the stream's name.
        definitions: their definitions, by name.
        mistake: makes the error for a consumer, and one of its fields, that only the stream shows to be wrong.
        unset: consumers whose definitions aren't known because a variable of theirs isn't set, with the error.
    """

    def __init__(
        self,
        stream: str,
        definitions: Mapping[str, Definition],
        mistake: Callable[[str, str | None, str], MillstreamError],
        unset: Mapping[str, MillstreamError] = MappingProxyType({}),
    ) -> None:
        self.definitions: Final = definitions
        self.names: Final = definitions.keys() | unset.keys()
        self.refused: Final[dict[str, MillstreamError]] = dict(unset)
        """Consumers that can't be as the file has them, with the reason."""
        self._stream = stream
        self._mistake = mistake

    def adapted(
        self,
        stored: Stored,
        open_reader: Callable[[], StreamReader],
        tables: Callable[[StreamReader], Iterable[TableSchema]],
    ) -> Stored:
        """Return a consumer as the file has it; as it is if it can't be so, which `check` reports.

        Args:
            stored: the consumer.
            open_reader: opens the log.
            tables: returns the newest schema of each table of the stream.
        """
        name = stored.definition.name
        wanted = self.definitions.get(name)
        if wanted is None and name in self.names:
            return stored
        if wanted is None:
            return _removed(stored) if stored.is_configured else stored
        try:
            conflict = conflict_of(stored.definition, wanted)
            if conflict is not None:
                raise self._mistake(name, conflict.field, conflict.problem)
            if stored.definition.selection != wanted.selection:
                wanted.check(tables(open_reader()))
            return _redefined(stored, wanted, open_reader)
        except MillstreamError as error:
            self.refuse(name, error)
            return stored

    def refuse(self, name: str, error: MillstreamError) -> None:
        """Note why a consumer can't be as the file has it."""
        found = self.reported(name, error)
        if name not in self.refused:
            logger.error("a consumer isn't as the file has it", stream=self._stream, error=found.message)
        self.refused[name] = found

    def reported(self, name: str, error: MillstreamError) -> MillstreamError:
        """Return the error with the place in the file, if the file has the mistake."""
        if isinstance(error, DeliveryError | CursorExpired):
            field = error.details.get("field") if isinstance(error, DeliveryError) else "start"
            return self._mistake(name, field, error.message)
        return error

    def accept(self, name: str) -> None:
        """Note that a consumer is as the file has it."""
        self.refused.pop(name, None)

    def check(self, name: str) -> None:
        """Raise the reason why a consumer can't be as the file has it, if there is one."""
        if name in self.refused:
            raise self.refused[name]

    def unmade(self, made: Container[str]) -> list[dict[str, Any]]:
        """Return the consumers of the file that can't begin, as a list of consumers shows them.

        Args:
            made: the consumers that exist.
        """
        return [
            {
                **(self.definitions[name].as_dict() if name in self.definitions else {"name": name}),
                "cursor": None,
                "state": str(Phase.PAUSED),
                **dict.fromkeys(("in_flight", "dead", "delivered", "redelivered", "acked"), 0),
                "lag": {"records": None, "bytes": None, "seconds": None},
                "backfill": None,
                "error": error.message,
            }
            for name, error in self.refused.items()
            if name not in made
        ]

    def only_there(self, name: str, what: str) -> DeliveryError:
        """Return the error for a call that can't do something to a consumer of the file."""
        return self._error(name, f"consumer {name} is in millstream.toml, and can't be {what} by a call")

    def stays_paused(self, name: str) -> DeliveryError:
        """Return the error for a call that would resume a consumer which is no longer in the file."""
        return self._error(
            name,
            f"consumer {name} isn't in millstream.toml any longer, and stays paused",
            f"Put it back, or remove it: `millstream consumer rm {name}`.",
        )

    def _error(self, name: str, problem: str, hint: str | None = None) -> DeliveryError:
        return DeliveryError(problem, code="consumer_configured", hint=hint, stream=self._stream, consumer=name)


def newest_tables(reader: StreamReader, captured: Iterable[TableSchema]) -> list[TableSchema]:
    """Return the newest schema of each table of a stream; of several tables of one name, that of the last.

    Args:
        reader: the log, which may have tables that the catalog lacks.
        captured: the newest schemas in the catalog.
    """
    found: dict[TableId, TableSchema] = {}
    with suppress(LogError):  # nothing has been written so far
        found.update(reader.schemas())
    found.update((schema.table_id, schema) for schema in captured)
    return list({found[table].full_name: found[table] for table in sorted(found)}.values())


def _redefined(stored: Stored, definition: Definition, open_reader: Callable[[], StreamReader]) -> Stored:
    """Return a consumer that is in the file, with its definition there.

    Args:
        stored: the consumer as it is.
        definition: its definition in the file, without a conflict.
        open_reader: opens the log.

    Raises:
        CorruptWal …: the log can't be read.
    """
    state, old = stored.state, stored.definition
    earlier = [one for one in stored.earlier if one.upto > state.cursor]
    if old.selection != definition.selection:
        delivered = {position for position, fact in state.facts.items() if fact.deliveries} | state.settled
        known = seq_of(max(delivered | state.facts.keys() | state.open | {state.upto}))
        if known > state.cursor:
            last = seq_of(max(delivered, default=0))
            earlier.append(Earlier(int(_end_of_operation(open_reader(), known)), int(last), old.selection))
    if old.sink is not None and definition.sink is None:  # a killed process may have had messages for hours
        state = replace(state, facts={position: replace(fact, deadline=0) for position, fact in state.facts.items()})
    is_back = stored.is_paused_by_removal and state.phase is Phase.PAUSED
    return replace(
        stored,
        definition=definition,
        state=replace(state, phase=Phase.ACTIVE) if is_back else state,
        earlier=earlier,
        is_configured=True,
        is_paused_by_removal=False,
    )


def _end_of_operation(reader: StreamReader, seq: Seq) -> Seq:
    """Return the number at the end of the operation that holds a number."""
    numbers = range(seq, max(seq, reader.persisted_upto()))
    place = bisect_left(numbers, True, key=lambda number: reader.whole_upto(Seq(number)) >= seq)
    return Seq(seq + place)


def _removed(stored: Stored) -> Stored:
    """Return a consumer that is no longer in the file: it is paused."""
    phase = stored.state.phase
    return replace(
        stored,
        state=replace(stored.state, phase=Phase.PAUSED) if phase is Phase.ACTIVE else stored.state,
        is_paused_by_removal=stored.is_paused_by_removal or phase is not Phase.PAUSED,
    )

"""The parts of a home that a stream's consumers need, and what they tell of a new consumer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Protocol

from millstream.delivery.backfill.rows import OpenLake
from millstream.delivery.configured_consumers import FileConsumers, newest_tables
from millstream.delivery.consumer_lookup import invalid_place
from millstream.delivery.definition import Definition
from millstream.delivery.json_record_schemas import RecordSchemas
from millstream.delivery.running_consumer import Running
from millstream.delivery.sinks import Place
from millstream.delivery.start_position import ParseMoment, resolve
from millstream.errors import MillstreamError, TokenFromFuture
from millstream.model.ids import StreamId, TableId
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema
from millstream.protocol.delivery.messages import UNSETTLED_BYTES_MAX
from millstream.wal.reader import StreamReader


class Holding(Protocol):
    """The home's record of what each consumer still needs of the log; see `millstream.protocol.retention`."""

    def hold(self, consumer: str, needed_from: Seq) -> None:
        """Hold the log from a number on, and not below. Raises `CursorExpired` if the consumer was cut off."""

    def release(self, consumer: str) -> None:
        """Hold nothing for the consumer, even if it was cut off."""

    def names(self) -> set[str]:
        """Return the consumers that hold the log, or were cut off."""

    def cut_off(self) -> set[str]:
        """Return the consumers that were cut off."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The parts of a home that a stream's consumers need."""

    stream: str
    stream_id: StreamId
    folder: Path
    """Folder of their state."""
    open_reader: Callable[[], StreamReader]
    holding: Holding
    parse_moment: ParseMoment
    quarantined: Callable[[], Mapping[TableId, str]]
    """Returns the tables that are quarantined now, with their names."""
    captured: Callable[[], Iterable[TableSchema]]
    """Returns the newest schema of each table that the home knows, also without a record in the log; see `newest_tables`."""
    file: FileConsumers
    open_lake: OpenLake
    is_server: bool = False
    """Whether this process is a server, which delivers to sinks at once."""
    database: str = ""
    """Name of the source's database; empty: there is none."""
    unsettled_bytes_max: int = UNSETTLED_BYTES_MAX
    """Most bytes of one consumer's unsettled messages in memory; see `Running`."""

    def resolve(self, text: str, reader: StreamReader, refuse: Callable[[str], MillstreamError]) -> Seq:
        """Return the number behind which a consumer begins; see `start_position.resolve`."""
        return resolve(text.strip(), reader, self.stream_id, self.parse_moment, lambda: datetime.now(UTC), refuse)

    def tables(self, reader: StreamReader) -> list[TableSchema]:
        """Return the newest schema of each table of the stream, by which definitions are checked."""
        return newest_tables(reader, self.captured())

    def start_of(self, definition: Definition, reader: StreamReader) -> Seq:
        """Return the number behind which a new consumer begins.

        Raises:
            DeliveryError (`invalid_consumer`): its definition doesn't fit the stream's tables, or its start is no place of
                the log.
            CursorExpired: retention has passed its start.
        """
        definition.check(self.tables(reader))
        try:
            return self.resolve(definition.start, reader, partial(invalid_place, "invalid_consumer", "start"))
        except TokenFromFuture as error:
            raise invalid_place("invalid_consumer", "start", error.message) from error

    def place(self, running: Running) -> Place:
        """Return what sinks use of a consumer."""
        schemas = RecordSchemas(self.open_reader())
        return Place(running.incarnation, self.database, running.definition.renamed, schemas.of)

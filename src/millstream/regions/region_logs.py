"""The logs of a stream's regions at a home, and how the configuration merges their tables: checks, and clocks."""

from __future__ import annotations

import contextlib
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from millstream.crdt.declared import TableMerge
from millstream.crdt.hlc import DRIFT_MAX_NS, HLC, NEVER, check_drift
from millstream.crdt.reconcile import HeardEnd
from millstream.errors import IngestError, LogError, MillstreamError, PositionError, ReplicationError, UnknownStream
from millstream.model.ids import RegionId, StreamId
from millstream.model.names import parse_qualified_name, qualified_name
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema
from millstream.wal.files import SystemClock
from millstream.wal.reader import StreamReader
from millstream.wal.truncation_check import end_at, still_says
from millstream.wal.writing.deduplicated_commits import writes_of

if TYPE_CHECKING:
    from millstream.config.model import StreamConfig
    from millstream.home.home import Home
    from millstream.home.paths import HomePaths
    from millstream.model.operations import Ack
    from millstream.model.writes import WriteId
    from millstream.wal.writing.writer import LogWriter

_HEARD_EVERY_S: Final = 0.2
"""The least time between two looks whether there are logs of other regions."""
_WRITES_AT_ONCE: Final = 4096
"""Writes noted at a time: nothing is appended while that runs."""


def region_readers(home: Home, stream: str, config: StreamConfig | None) -> dict[RegionId, StreamReader]:
    """Return a home's logs of a stream's regions, its own first.

    Raises:
        ReplicationError (`other_region`): another region's log is named like the home's own region.
    """
    return {region: StreamReader(folder) for region, folder in region_logs(home, stream, config).items()}


def region_logs(home: HomePaths, stream: str, config: StreamConfig | None) -> dict[RegionId, str]:
    """Return the folders of a home's logs of a stream's regions, its own first. Raises as `region_readers`."""
    own = RegionId(0 if config is None else config.region)
    names = home.regions_on_disk(stream)
    if own in names:
        raise ReplicationError(
            f"data/wal/{names[own]} is named for region {own}, which is this home's own",
            code="other_region",
            hint=f"Set `region` in [streams.{stream}] to a number of this home's own, or move the folder away.",
        )
    return {region: str(home.wal_folder(name)) for region, name in ({own: stream} | names).items()}


def declared_tables(home: Home, stream: str) -> list[str]:
    """Return the names of the tables whose merge the configuration declares, and that a region has written.

    Raises:
        ReplicationError (`other_region`), LogError: as `RegionTable`.
    """
    config = home.config.streams.get(stream) if home.config_file.exists() else None
    declared = {parse_qualified_name(name) for name in (() if config is None else config.merge)}
    written = {
        (schema.namespace, schema.name)
        for reader in (region_readers(home, stream, config).values() if declared else ())
        for schema in reader.schema_versions().values()
    }
    return sorted(qualified_name(*name) for name in declared & written)


def merge_of(config: StreamConfig | None, table: str) -> TableMerge:
    """Return how a table merges, however its name is written."""
    wanted = parse_qualified_name(table)
    declared: Mapping[str, Mapping[str, str]] = {} if config is None else config.merge
    return next(
        (TableMerge.parse(words) for name, words in declared.items() if parse_qualified_name(name) == wanted),
        TableMerge(),
    )


def check_forms(table: str, schemas: Iterable[TableSchema], merge: TableMerge) -> None:
    """Raise `IngestError` (`merge_changed`) if a column's rows hold increments and the configuration says totals, or the reverse."""
    for schema in schemas:
        for column in schema.columns:
            configured = merge.increments.get(column.name, "")
            if column.accumulates != configured:
                raise IngestError(
                    f"rows of {table} have {column.accumulates or 'values'} in column {column.name}, and the "
                    f"configuration says {configured or 'values'}",
                    code="merge_changed",
                    table=table,
                    column=column.name,
                )


def check_merges(config: StreamConfig, schemas: Iterable[TableSchema]) -> None:
    """Refuse merge declarations that don't fit the tables' columns; `merge_unsuitable` names table and column."""
    declared = {parse_qualified_name(name) for name in config.merge}
    for schema in schemas:
        if schema.source == 0 and (schema.namespace, schema.name) in declared:
            merge_of(config, schema.full_name).check(schema.full_name, schema.to_arrow(), schema.key, whole=False)


def examine_regions(home: Home, stream: str, config: StreamConfig) -> str:
    """Check before a writer starts that each log belongs to its region, and that tables can merge as configured.

    Raises:
        ReplicationError (`merge_unsuitable`), ReplicationError (`other_region`): an error that would prevent opening the stream.
        LogError, CatalogError: the check isn't possible.
    """
    if home.has_catalog():
        with home.open_catalog() as catalog, contextlib.suppress(UnknownStream):
            check_merges(config, catalog.latest_schemas(catalog.stream(stream).id).values())
    copies = []
    for region, reader in region_readers(home, stream, config).items():
        if region != config.region:
            copies.append(region)
        elif not home.wal_folder(stream).exists():
            continue
        newest_time(reader, region)
    words = [f"this is region {config.region}"] if config.region else []
    words += [f"has the log of region {region}" for region in copies]
    words += [f"{len(config.merge)} table{'s' * (len(config.merge) != 1)} can merge"] if config.merge else []
    return ", ".join(words)


def clocks_ahead(home: Home, stream: str, config: StreamConfig) -> Iterator[ReplicationError]:
    """Yield an error for each region whose newest record is further ahead of this machine's clock than is allowed."""
    now_ns = SystemClock().now_ns()
    for region, reader in region_readers(home, stream, config).items():
        with contextlib.suppress(LogError):  # nothing has come yet
            newest = newest_time(reader, region)
            try:
                check_drift(newest or NEVER, now_ns, name=f"region {region}")
            except ReplicationError as error:
                yield error


@dataclass(frozen=True, slots=True)
class _ReadTo:
    """The end of the part of a region's log whose writes were noted."""

    stream: StreamId
    upto: Seq
    end: HeardEnd | None


class RegionClocks:
    """The clocks of the regions that a home follows, and the writes with sessions or keys that their logs have.

    For one thread at a time.

    Readers are kept from look to look: a new one would read the last segment of its log from the beginning.

    Args:
        home: the home.
        stream: the stream's name.
        config: its configuration.
    """

    def __init__(self, home: Home, stream: str, config: StreamConfig) -> None:
        self._home = home
        self._stream = stream
        self._config = config
        self._readers: dict[str, StreamReader] = {}
        self._heard: dict[str, Seq] = {}
        """By folder, the end of the log whose time was received last."""

    def hear(self, log: LogWriter) -> bool:
        """Advance a writer's clock past the regions that its home follows, and note the writes that they have.

        Returns:
            Whether there are any.

        Raises:
            ReplicationError (`clock_skew`): a region's clock is too far ahead of this one; the others' have been heard, and its writes noted.
            ReplicationError (`other_region`): a log belongs to another region than its folder.
            LogError, PositionError: a log can't be read; the others' clocks have been heard.
        """
        if not self._home.regions_on_disk(self._stream):
            return False
        failed: MillstreamError | None = None
        for region, folder in region_logs(self._home, self._stream, self._config).items():
            if region == self._config.region:
                continue
            try:
                self._hear(log, region, folder)
            except MillstreamError as error:
                failed = error
        if failed is not None:
            raise failed
        return True

    def _hear(self, log: LogWriter, region: RegionId, folder: str) -> None:
        reader = self._readers.pop(folder, None)
        if reader is not None:
            # A log that was cut or recreated since needs a new reader.
            with contextlib.suppress(LogError, PositionError):
                self._hear_by(reader, log, region, folder)
                return
        self._heard.pop(folder, None)
        self._hear_by(StreamReader(folder), log, region, folder)

    def _hear_by(self, reader: StreamReader, log: LogWriter, region: RegionId, folder: str) -> None:
        upto = reader.persisted_upto()
        if upto != self._heard.get(folder):
            newest = newest_time(reader, region)
            if newest is not None:
                self._readers[folder] = reader
                # First: a repeated write is one whatever the clocks show.
                _hear_writes(reader, region, log)
                _hear_time(reader, region, newest, log)
                self._heard[folder] = upto
        self._readers[folder] = reader


def _hear_time(reader: StreamReader, region: RegionId, newest: HLC, log: LogWriter) -> None:
    """Advance a writer's clock past a region's log; if its newest time is too far ahead, past those that aren't.

    Raises:
        ReplicationError (`clock_skew`): the newest time is too far ahead.
    """
    name = f"region {region}"
    try:
        log.hear(newest, name=name)
    except ReplicationError:
        within = newest_time_within(reader, region, SystemClock().now_ns() + DRIFT_MAX_NS)
        if within is not None:
            log.hear(within, name=name)
        raise


def _hear_writes(reader: StreamReader, region: RegionId, log: LogWriter) -> None:
    """Note the writes that a region's log has since the last call; all of them if it was cut back or recreated."""
    upto = reader.persisted_upto()
    before = log.place_in(region)
    after, is_anew = Seq(0), True
    if isinstance(before, _ReadTo) and before.stream == reader.stream_id:
        if before.upto == upto:
            return
        if before.upto < upto and still_says(reader, before.upto, before.end):
            after, is_anew = before.upto, False
    writes: list[tuple[WriteId, int, Ack, int]] = []
    read = after
    first = reader.first_seq()
    for group in reader.read_groups(max(after, Seq(first - 1)), upto):
        writes += writes_of(group)
        header = group[0].header
        read = header.group_last_seq
        if len(writes) >= _WRITES_AT_ONCE:
            end = HeardEnd(read, header.group, header.epoch, header.hybrid_time)
            log.hear_writes(region, writes, _ReadTo(reader.stream_id, read, end), is_anew=is_anew, is_cut=first > 1)
            writes, is_anew = [], False
    place = _ReadTo(reader.stream_id, upto, end_at(reader, upto))
    log.hear_writes(region, writes, place, is_anew=is_anew, is_cut=first > 1)


class RegionsHeard:
    """Hears other regions before a write: it may repeat one of theirs, and its time has to be later than theirs.

    A home without logs of other regions is looked at every so often.

    Args:
        hear: hears them; returns whether there are any.
    """

    def __init__(self, hear: Callable[[], bool]) -> None:
        self._hear = hear
        self._has_regions = False
        self._next_s = 0.0
        self._looks = 0
        """Number of looks that have begun."""
        self._hearing = threading.Lock()

    def __call__(self) -> None:
        """Hear what was there at the call. An error of theirs stops no write here: the owner reports it. Any thread."""
        now_s = time.monotonic()
        if not self._has_regions and now_s < self._next_s:
            return
        next_look = self._looks + 1
        with self._hearing:
            if self._looks >= next_look:
                return  # another thread's began after the call
            self._looks += 1
            self._next_s = now_s + _HEARD_EVERY_S
            self._has_regions = True
            with contextlib.suppress(MillstreamError):
                self._has_regions = self._hear()


def newest_time(reader: StreamReader, region: RegionId) -> HLC | None:
    """Return the time of a region's last commit group; None if there is none, or its last number was never used."""
    upto = reader.persisted_upto()
    for group in reader.read_groups(Seq(max(upto - 1, 0)), upto):
        header = group[0].header
        check_region(header.region, region)
        return HLC(header.hybrid_time, int(header.group_last_seq), int(region))
    return None


def newest_time_within(reader: StreamReader, region: RegionId, limit_ns: int) -> HLC | None:
    """Return the time of a region's last commit group at or before a moment; None if there is none.

    Times only grow in a log, so a few of its groups are read.
    """
    upto = reader.persisted_upto()

    def time_from(seq: int) -> int:
        """Return the time of the group that has a number, or of the next one."""
        return next((group[0].header.hybrid_time for group in reader.read_groups(Seq(seq - 1), upto)), limit_ns + 1)

    numbers = range(int(reader.first_seq()), int(upto) + 1)
    count = bisect_right(numbers, limit_ns, key=time_from)
    return None if not count else HLC(time_from(numbers[count - 1]), numbers[count - 1], int(region))


def check_region(found: RegionId, expected: RegionId) -> None:
    """Raise `ReplicationError` (`other_region`) unless a log belongs to the region that its folder names."""
    if found != expected:
        raise ReplicationError(
            f"the log that stands for region {expected} is that of region {found}",
            code="other_region",
            found=int(found),
            expected=int(expected),
        )

"""How a writer hears other regions: their logs' newest times, and their writes with sessions or keys."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from millstream.crdt.hlc import DRIFT_MAX_NS, HLC, NEVER, check_drift
from millstream.crdt.region_state import HeardEnd
from millstream.errors import LogError, MillstreamError, PositionError, ReplicationError
from millstream.model.ids import RegionId, StreamId
from millstream.model.positions import Seq
from millstream.regions.region_folders import check_region, region_logs, region_readers
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
"""The least time in seconds between two looks for logs of other regions, or for what writes repeat, or at a log that failed."""
_WRITES_AT_ONCE: Final = 4096
"""Writes noted at a time: nothing is appended while that runs."""


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


class _OtherRegions(ABC):
    """The logs of the other regions that a home follows; each is observed once it has more. For one thread at a time.

    Readers are kept from look to look: a new one would read the last segment of its log from the beginning.
    """

    def __init__(self, home: HomePaths, stream: str, config: StreamConfig) -> None:
        self._home = home
        self._stream = stream
        self._config = config
        self._readers: dict[str, StreamReader] = {}
        self._heard: dict[str, object] = {}
        """By folder, `_end` of the log when it was observed last."""

    @abstractmethod
    def _end(self, reader: StreamReader) -> object:
        """Return a value that changes with the log's end."""

    @abstractmethod
    def _observe(self, reader: StreamReader, region: RegionId, newest: HLC) -> None:
        """Observe a log, and the time of its newest commit group."""

    def _folders(self) -> dict[RegionId, str]:
        logs = region_logs(self._home, self._stream, self._config)
        return {region: folder for region, folder in logs.items() if region != self._config.region}

    def _look(self, region: RegionId, folder: str) -> None:
        reader = self._readers.pop(folder, None)
        if reader is not None:
            # A log that was cut or recreated since needs a new reader.
            with contextlib.suppress(LogError, PositionError, OSError):
                self._look_by(reader, region, folder)
                return
        self._heard.pop(folder, None)
        self._look_by(StreamReader(folder), region, folder)

    def _look_by(self, reader: StreamReader, region: RegionId, folder: str) -> None:
        end = self._end(reader)
        if end != self._heard.get(folder):
            newest = newest_time(reader, region)
            self._readers[folder] = reader
            if newest is not None:
                self._observe(reader, region, newest)
            self._heard[folder] = end
        self._readers[folder] = reader


class RegionClocks(_OtherRegions):
    """The clocks of the regions that a home follows, and the writes with sessions or keys that their logs have."""

    def __init__(self, home: HomePaths, stream: str, config: StreamConfig) -> None:
        super().__init__(home, stream, config)
        self._log: LogWriter

    def hear(self, log: LogWriter) -> None:
        """Advance a writer's clock past the regions that its home follows, and note the writes that they have.

        Raises:
            ReplicationError (`clock_skew`): a region's clock is too far ahead of this one; the others' have been heard, and its writes noted.
            ReplicationError (`other_region`): a log belongs to another region than its folder.
            LogError, PositionError: a log can't be read; the others' clocks have been heard.
        """
        if not self._home.regions_on_disk(self._stream):
            return
        self._log = log
        failed: MillstreamError | None = None
        for region, folder in self._folders().items():
            try:
                self._look(region, folder)
            except MillstreamError as error:
                failed = error
        if failed is not None:
            raise failed

    def _end(self, reader: StreamReader) -> object:
        return reader.persisted_upto()

    def _observe(self, reader: StreamReader, region: RegionId, newest: HLC) -> None:
        # First: a repeated write is one whatever the clocks show.
        _hear_writes(reader, region, self._log)
        _hear_time(reader, region, newest, self._log.hear)


def _hear_time(reader: StreamReader, region: RegionId, newest: HLC, hear: HearTime) -> None:
    """Advance a writer's clock past a region's log; if its newest time is too far ahead, past those that aren't.

    Raises:
        ReplicationError (`clock_skew`): the newest time is too far ahead.
    """
    name = f"region {region}"
    try:
        hear(newest, name=name)
    except ReplicationError:
        within = newest_time_within(reader, region, SystemClock().now_ns() + DRIFT_MAX_NS)
        if within is not None:
            hear(within, name=name)
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
    """Hears other regions before a write that may repeat one of theirs, at most every so often."""

    def __init__(self, hear: Callable[[], None]) -> None:
        self._hear = hear
        self._next_s = 0.0
        self._hearing = threading.Lock()

    def __call__(self) -> None:
        """Hear them if it is time. An error of theirs stops no write here: the owner reports it. Any thread."""
        if time.monotonic() < self._next_s or self._hearing.locked():
            return
        with self._hearing, contextlib.suppress(MillstreamError, OSError):
            if time.monotonic() >= self._next_s:
                self._next_s = time.monotonic() + _HEARD_EVERY_S
                self._hear()


class HearTime(Protocol):
    """Observes another region's time, as `LogWriter.hear`."""

    def __call__(self, time: HLC, *, name: str) -> None:
        """Observe it. Raises `ReplicationError` (`clock_skew`) if it is too far ahead."""


class RegionTimes(_OtherRegions):
    """The newest times of other regions' logs, for a writer that is about to take a commit group's time.

    A write has to be later than every row that its region has read before. A log that can't be read, or whose newest
    time is too far ahead, is left alone for a while.
    """

    def __init__(self, home: HomePaths, stream: str, config: StreamConfig, hear: HearTime) -> None:
        super().__init__(home, stream, config)
        self._hear = hear
        self._known: dict[RegionId, str] = {}
        self._next_look_s = 0.0
        self._asked_from_s: dict[str, float] = {}
        """By folder, the moment from which a log that failed is asked again."""

    def __call__(self) -> None:
        """Observe what is new. Errors stop no write here: the stream's owner reports them."""
        now_s = time.monotonic()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + _HEARD_EVERY_S
            with contextlib.suppress(MillstreamError, OSError):
                self._known = self._folders()
        for region, folder in self._known.items():
            if now_s >= self._asked_from_s.get(folder, 0.0):
                try:
                    self._look(region, folder)
                except (MillstreamError, OSError):
                    self._asked_from_s[folder] = time.monotonic() + _HEARD_EVERY_S

    def _end(self, reader: StreamReader) -> object:
        return reader.extent.marks()[0]

    def _observe(self, reader: StreamReader, region: RegionId, newest: HLC) -> None:
        _hear_time(reader, region, newest, self._hear)


def newest_time(reader: StreamReader, region: RegionId) -> HLC | None:
    """Return the time of a region's last commit group; None if there is none."""
    upto = reader.persisted_upto()
    headers = reader.newest_headers(upto)
    if all(header.group_last_seq != upto for header in headers):
        # The last number was never used, or its group can't be read: then this raises.
        headers += [group[0].header for group in reader.read_groups(Seq(max(upto - 1, 0)), upto)]
    if not headers:
        return None
    newest = max(headers, key=lambda header: header.group_last_seq)
    check_region(newest.region, region)
    return HLC(newest.hybrid_time, int(newest.group_last_seq), int(region))


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

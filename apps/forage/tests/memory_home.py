"""A home in memory, with the calls that the engine makes: fast enough for thousands of restarts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import count
from typing import Any

import pyarrow as pa

from millstream import AppendedTables, StreamToken
from millstream.errors import AppendOutcomeUnknown, ReplicationError, SessionExpired, UnknownStream, UnknownTable
from millstream_forage.clock import Clock
from millstream_forage.embedding import HashedGrams
from millstream_forage.engine import ForageEngine
from millstream_forage.tables import HIDES
from millstream_forage.taste import MATCH_THRESHOLD

STREAM_ID = "0123abcd"


class Part:
    """One table's part of an append, as `millstream` answers it."""

    def __init__(self, first: int, rows: int) -> None:
        self.first = first
        self.rows = rows


class MemoryHome:
    """The log: batches in order, each of one table. It outlives the engines that are opened on it."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int, pa.RecordBatch]] = []
        self.end = 0
        self.lose_next = False
        """Whether the next append fails before it is durable."""
        self.silence_next = False
        """Whether the next append is durable, and its answer lost."""
        self.expire_sessions = False
        """Whether the next append finds its session forgotten."""
        self.appends = 0

    def token(self, _stream: str, at: int | None = None) -> StreamToken:
        return StreamToken.parse(f"{STREAM_ID}.s{self.end if at is None else at}")

    def append_all(self, stream: str, tables: Mapping[str, pa.Table]) -> AppendedTables:
        if self.lose_next:
            self.lose_next = False
            raise AppendOutcomeUnknown("the disk failed")
        parts = {}
        for name, table in tables.items():
            batch = table.combine_chunks().to_batches()[0]
            parts[f"public.{name}"] = Part(self.end + 1, batch.num_rows)
            self.append(name, batch)
        self.appends += bool(tables)
        if self.silence_next:
            self.silence_next = False
            raise AppendOutcomeUnknown("the answer was lost")
        return AppendedTables(self.token(stream), False, parts)

    def session(self, stream: str) -> MemorySession:
        return MemorySession(self, stream)

    def append(self, name: str, batch: pa.RecordBatch) -> None:
        seqs = pa.array(range(self.end + 1, self.end + 1 + batch.num_rows), pa.int64())
        times = pa.array([self.time()] * batch.num_rows, pa.timestamp("us", "UTC"))
        numbered = batch.append_column("__seq", seqs).append_column("__commit_ts", times)
        named = numbered.replace_schema_metadata({"millstream.table": f'{{"name": "{name}"}}'})
        self.log.append((name, self.end + 1, named))
        self.end += batch.num_rows

    def time(self) -> int:
        """Return the time of the next commit."""
        return self.end

    def read(
        self, _stream: str, *, table: str | None = None, after: StreamToken | str, upto: StreamToken
    ) -> Iterator[pa.RecordBatch]:
        begin = StreamToken.parse(str(after)).minimum
        if table is not None and table not in {name for name, _, _ in self.log}:
            raise UnknownTable(f"the log has no records of {table}")
        for name, first, batch in self.log:
            if table in (None, name) and begin < first <= upto.minimum:
                yield batch

    def rows(self, table: str) -> list[dict[str, Any]]:
        return [row for name, _, batch in self.log if name == table for row in batch.to_pylist()]


class MemorySession:
    """A session, which appends what has one number once."""

    def __init__(self, home: MemoryHome, stream: str) -> None:
        self._home = home
        self._stream = stream
        self._next = count(1)
        self._durable: set[int] = set()

    def append_all(self, tables: Mapping[str, pa.Table], *, number: int | None = None) -> AppendedTables:
        if self._home.expire_sessions:
            self._home.expire_sessions = False
            raise SessionExpired("the session hasn't written for days")
        given = next(self._next) if number is None else number
        if given in self._durable:
            tables = {}
        before = self._home.end
        try:
            return self._home.append_all(self._stream, tables)
        except AppendOutcomeUnknown as error:
            raise AppendOutcomeUnknown(error.message, number=given) from None
        finally:
            if self._home.end > before:
                self._durable.add(given)


class MemoryRegion(MemoryHome):
    """A region's home, with copies of other regions' logs that are as new as the last `hear`."""

    def __init__(self, region: int, times: Iterator[int]) -> None:
        super().__init__()
        self.region = region
        self.others: dict[str, MemoryHome] = {}
        self._times = times
        self._time = 0
        self.hybrid: dict[int, int] = {}
        """Hybrid time of each record of this region's log, by its number."""
        self.fail_next_merge = False
        """Whether the next merge fails, as if another region's rows were too old."""
        self.merges = 0

    def append(self, name: str, batch: pa.RecordBatch) -> None:
        first = self.end + 1
        super().append(name, batch)
        self.hybrid |= dict.fromkeys(range(first, self.end + 1), self._time)

    def time(self) -> int:
        self._time = next(self._times)
        return self._time

    def hear(self, other: MemoryRegion, end: int) -> None:
        """Copy another region's log up to a number, or as far as the copy goes already."""
        copy = self.others.setdefault(f"forage@{other.region}", MemoryHome())
        if end > copy.end:
            copy.log = [(name, first, batch) for name, first, batch in other.log if first <= end]
            copy.end = max((first + batch.num_rows - 1 for _, first, batch in copy.log), default=0)

    def token(self, stream: str, at: int | None = None) -> StreamToken:
        if stream == "forage":
            return super().token(stream, at)
        if stream not in self.others:
            raise UnknownStream(f"{stream} hasn't come yet")
        return self.others[stream].token(stream, at)

    def read(
        self, stream: str, *, table: str | None = None, after: StreamToken | str, upto: StreamToken
    ) -> Iterator[pa.RecordBatch]:
        if stream == "forage":
            yield from super().read(stream, table=table, after=after, upto=upto)
        else:
            yield from self.others[stream].read(stream, table=table, after=after, upto=upto)

    def merged(self, _stream: str, table: str) -> pa.Table:
        """Return the merged hides as Millstream merges a column of kind `hide`: hidden unless lifted later."""
        self.merges += 1
        if self.fail_next_merge:
            self.fail_next_merge = False
            raise ReplicationError("another region's rows are too old", code="replica_too_stale")
        newest: dict[tuple[int, str, str], dict[bool, int]] = {}
        for region, home in ((self.region, self), *((int(name[7:]), home) for name, home in self.others.items())):
            for row in home.rows(table):
                times = newest.setdefault((row["user"], row["target"], row["value"]), {})
                time = WORLD[region].hybrid[row["__seq"]]
                times[row["hidden"]] = max(time, times.get(row["hidden"], 0))
        rows = [
            {"user": user, "target": target, "value": value, "hidden": times.get(True, 0) >= times.get(False, 0)}
            for (user, target, value), times in newest.items()
        ]
        return pa.Table.from_pylist(rows, schema=pa.schema([HIDES.field(name) for name in HIDES.names[:4]]))


WORLD: dict[int, MemoryRegion] = {}
"""The regions of the running test, for their records' hybrid times."""


def engine_on(home: Any, clock: Clock, *, match_threshold: float = MATCH_THRESHOLD) -> ForageEngine:
    """Open an engine on a home in memory."""
    return ForageEngine(
        home,
        region=getattr(home, "region", 0),
        others=[region for region in WORLD if region != home.region] if isinstance(home, MemoryRegion) else [],
        clock=clock,
        embedder=HashedGrams(),
        match_threshold=match_threshold,
    )


@cache
def corpus_log() -> list[tuple[str, int, pa.RecordBatch]]:
    """Return the records of the default corpus: its embeddings take longer than most tests."""
    home = MemoryHome()
    with engine_on(home, SetClock()) as engine:
        engine.seed_default_corpus()
    return home.log


def seeded_home() -> MemoryHome:
    """Return a home with the default corpus."""
    home = MemoryHome()
    home.log = list(corpus_log())
    home.end = sum(batch.num_rows for _, _, batch in home.log)
    return home


class SetClock:
    """A clock that a test sets."""

    def __init__(self, now_ns: int = 1_700_000_000_000_000_000) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns

"""The log and its fold: what is appended is durable and folded once the call returns.

Rows that this process appended are folded as they are, unless another process's records stand between them. Everything
else is read from the log. Both give the same state, because the state depends on records alone.

If the home follows other regions, their logs are folded too, and `hides` are the merged ones: a target that any region
hides is hidden here as soon as its record is, and shows again if a later record of any region lifts that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream import AppendedTables, OpenHome, StreamToken
from millstream.errors import (
    AppendOutcomeUnknown,
    DedupWindowExpired,
    LogError,
    ReplicationError,
    SessionExpired,
    UnknownStream,
    UnknownTable,
)
from millstream_forage.errors import EngineFailed
from millstream_forage.folded_state import State
from millstream_forage.tables import REGION_BITS, SCHEMAS, STREAM
from millstream_forage.usable_records import usable


class FoldedLog:
    """A home's log with its state. One caller at a time."""

    def __init__(self, home: OpenHome, regions: Iterable[int] = ()) -> None:
        """Fold the logs, and begin this region's if there is none.

        Args:
            regions: the other regions that the home follows. A log that hasn't come yet is waited for.

        Raises:
            ReplicationError (`other_region`): see `check_region`.
            OffsetExpired: a part of a log is gone. Its records decide what is hidden, so nothing goes without them.
            MillstreamError: a log can't be read or written.
        """
        self._home: Final = home
        self._others: Final = [log_of(region) for region in regions]
        # A session sends an append again if the process that writes the log ends before it answers.
        self._session = home.session(STREAM)
        # Rows of an append whose outcome is unknown, with its number in the session.
        self._unknown: tuple[Mapping[str, pa.Table], int] | None = None
        self._closed = False
        self.state: Final = State()
        self.at: StreamToken = home.append_all(STREAM, {}).token
        """The token up to which this region's log is folded."""
        # The same for the logs of other regions, by their names.
        self._others_at: dict[str, StreamToken] = {}
        # Whether records of `hides` came that have to be merged. If a call fails before it has done so, the next one does.
        self._has_hides_to_merge = False
        self._fold_everything()

    @property
    def path(self) -> Path:
        """The home's folder."""
        return self._home.path

    def close(self) -> None:
        """Take no more calls."""
        self._closed = True

    def catch_up(self) -> None:
        """Fold what other processes have appended, after the outcome of an earlier append is known.

        Raises:
            EngineFailed: the log is closed.
            AppendOutcomeUnknown: the outcome of an earlier append is still unknown.
            MillstreamError: the log can't be read or written.
        """
        if self._closed:
            raise EngineFailed("the engine is closed")
        if self._unknown is not None:
            # Under the same number, the rows are in the log once, whether they were before or not. Until then an id of theirs
            # must not be handed out again.
            tables, number = self._unknown
            with suppress(DedupWindowExpired):  # it was durable long ago
                self._appended(tables, number)
            self._unknown = None
        token = self._home.token(STREAM)
        if token != self.at:
            self._fold_upto(token)
        for name, end in self._news():
            self._fold_other(name, end)
        if self._has_hides_to_merge and self._others_at:
            self.state.replace_hides(self._merged_hides(), int(self.at.minimum))
        self._has_hides_to_merge = False

    def append(self, rows: Mapping[str, list[dict[str, Any]]]) -> None:
        """Append rows of several tables as one operation, and fold them once they are durable.

        Raises:
            AppendOutcomeUnknown: they may or may not be durable. The next `catch_up` appends them if they aren't.
            MillstreamError: nothing was appended.
        """
        tables = {name: pa.RecordBatch.from_pylist(part, schema=SCHEMAS[name]) for name, part in rows.items() if part}
        if not tables:
            return
        ack = self._appended({name: pa.Table.from_batches([batch]) for name, batch in tables.items()})
        if not self._fold_own(tables, ack):
            self._fold_upto(ack.token)

    def _appended(self, tables: Mapping[str, pa.Table], number: int | None = None) -> AppendedTables:
        """Append; with a number, what was sent under it before."""
        try:
            try:
                return self._session.append_all(tables, number=number)
            except SessionExpired:  # after days without an append
                self._session = self._home.session(STREAM)
                return self._session.append_all(tables)
        except AppendOutcomeUnknown as error:
            self._unknown = tables, error.details["number"]
            raise

    def _fold_own(self, tables: Mapping[str, pa.RecordBatch], ack: AppendedTables) -> bool:
        """Fold rows that this engine appended without reading them; False if others stand between."""
        seq = int(self.at.minimum) + 1
        numbers = {}
        for name, batch in tables.items():
            if ack.tables[f"public.{name}"].first != seq:
                return False
            numbers[name] = np.arange(seq, seq + batch.num_rows)
            seq += batch.num_rows
        if ack.token.minimum != seq - 1 or ack.token.ahead:
            return False
        for name, batch in tables.items():
            self._fold(name, batch.append_column("__seq", pa.array(numbers[name])))
        self.at = ack.token
        return True

    def _fold(self, table: str, batch: pa.RecordBatch) -> None:
        """Fold records. After a failure the state has a part of them: nothing is answered from it."""
        # A new hide is later than all records that this region has, so the fold alone is right. A lifted target may stay hidden.
        self._has_hides_to_merge |= table == "hides" and not pc.all(batch["hidden"]).as_py()
        try:
            self.state.apply(table, batch)
        except BaseException:
            self._closed = True
            raise

    def _fold_upto(self, token: StreamToken) -> None:
        for batch in self._home.read(STREAM, after=self.at, upto=token):
            table = table_of(batch)
            self._fold(table, usable(table, batch))
        self.at = token

    def _news(self) -> Iterator[tuple[str, StreamToken]]:
        """Yield the logs of other regions that have more than is folded, with their ends."""
        for name, token in ends_of(self._home, self._others).items():
            if token != self._others_at.get(name):
                yield name, token

    def _fold_other(self, name: str, token: StreamToken) -> None:
        """Fold the news of another region's log, except hides, which are merged."""
        for batch in self._home.read(name, after=self._others_at.get(name, beginning(token)), upto=token):
            table = table_of(batch)
            records = usable(table, batch)
            check_region(records, name)
            if table == "hides":
                self._has_hides_to_merge = True
            else:
                self._fold(table, foreign(records, int(self.at.minimum)))
        self._others_at[name] = token

    def _merged_hides(self) -> pa.Table:
        """Return the rows of `hides` as all regions' records make them."""
        return usable("hides", self._home.merged(STREAM, "hides"))

    def _fold_everything(self) -> None:
        """Fold the logs table by table: whole tables fold much faster than the small batches of their order."""
        self._others_at = dict(self._news())
        for table in SCHEMAS:
            own = whole_table(self._home, STREAM, table, self.at)
            others = [whole_table(self._home, name, table, token) for name, token in self._others_at.items()]
            if table == "hides":
                for batch in own:
                    self.state.apply(table, batch)
                if any(True for batches in others for _ in batches):
                    self.state.replace_hides(self._merged_hides(), 0)
            else:
                for batch in in_order(table, own, [map(foreign, batches) for batches in others]):
                    self.state.apply(table, batch)
        self.state.index()


def log_of(region: int) -> str:
    """Return the name of the log that another region writes, as this home keeps it."""
    return f"{STREAM}@{region}"


def ends_of(home: OpenHome, logs: Iterable[str]) -> dict[str, StreamToken]:
    """Return the end of each log, without those that haven't come yet."""
    ends = {}
    for name in logs:
        try:
            ends[name] = home.token(name)
        except UnknownStream:
            continue
        except LogError as error:
            if error.code != "log_empty":  # the follower has made the folder, and no record has come
                raise
    return ends


def whole_table(home: OpenHome, log: str, table: str, token: StreamToken) -> Iterator[pa.RecordBatch]:
    """Yield a whole table of a log up to a token; nothing if the log has none of it. Raises as `check_region`."""
    with suppress(UnknownTable):
        for batch in home.read(log, table=table, after=beginning(token), upto=token):
            records = usable(table, batch)
            check_region(records, log)
            yield records


def check_region(batch: pa.RecordBatch, log: str) -> None:
    """Check that the records of another region's log have ids that this region hands out.

    Raises:
        ReplicationError (`other_region`): two homes have one region's number, so that an id of theirs means two records.
    """
    region = log.partition("@")[2]
    if region and "id" in batch.schema.names and batch.num_rows:
        found = set((batch.column("id").to_numpy() >> REGION_BITS).tolist()) - {int(region)}
        if found:
            raise ReplicationError(
                f"the log {log} has ids of region {min(found)}",
                code="other_region",
                found=min(found),
                expected=int(region),
            )


def beginning(token: StreamToken) -> str:
    """Return the token before the first record of a token's log."""
    return f"{token.stream}.s0"


def foreign(batch: pa.RecordBatch, seq: int = 0) -> pa.RecordBatch:
    """Return another region's records under a number of this region's log: its newest when they came, 0 if that isn't known."""
    at = batch.schema.get_field_index("__seq")
    return batch.set_column(at, batch.schema.field(at), pa.array(np.full(batch.num_rows, seq, np.int64)))


def in_order(
    table: str, own: Iterable[pa.RecordBatch], others: Sequence[Iterable[pa.RecordBatch]]
) -> Iterator[pa.RecordBatch]:
    """Yield a table's records in several logs, so that each log keeps its order.

    Impressions and signals come by the times of their commits. That is about the order in which a running engine has folded
    them: the user's last feed can be computed again, and the same one of two signals counts. Other tables' logs come
    one after the other.
    """
    if not others or table not in {"impressions", "signals"}:
        yield from chain(own, *others)
        return
    names = [*SCHEMAS[table].names, "__seq", "__commit_ts"]
    batches, times = [], []
    # The own log last: if its clock is behind, its records have the times of those that it had read.
    for log in (*others, own):
        of_log = [batch.select(names).replace_schema_metadata() for batch in log]
        if of_log:
            commits = [batch["__commit_ts"].cast(pa.int64()).to_numpy() for batch in of_log]
            times.append(np.maximum.accumulate(np.concatenate(commits)))  # a clock may be set back
            batches += of_log
    if batches:
        order = np.argsort(np.concatenate(times), kind="stable")
        yield from pa.Table.from_batches(batches).take(pa.array(order)).combine_chunks().to_batches()


def table_of(batch: pa.RecordBatch) -> str:
    """Return the name of the table that a batch of the log is of."""
    return str(json.loads(batch.schema.metadata[b"millstream.table"])["name"])

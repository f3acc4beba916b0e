"""Tables that several regions write, read as one: from all regions' logs that a home has, including its own.

The merged state is kept in `data/regions/<stream>/`, a file per table, so that the next read takes only
what the logs have after it. The file is derived: without it everything is read again, as far back as
retention has kept the logs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.config.stream_checks import key_of
from millstream.crdt.columns import whole_column
from millstream.crdt.declared import union_of
from millstream.crdt.region_state import (
    Ends,
    Missing,
    ReconciliationEngine,
    RegionState,
    Vector,
    behind,
    table_in,
    vector_of,
    widened,
)
from millstream.crdt.row_merge import (
    REGION,
    SEQ,
    WALL,
    fold,
    lift,
    of_keys,
    own_columns,
    state_schema,
    subtracting_region,
    subtractions,
)
from millstream.errors import (
    LakeError,
    LogError,
    LogTruncated,
    OffsetExpired,
    PositionError,
    ReplicationError,
    TokenFromFuture,
    UnknownTable,
)
from millstream.model.ids import RegionId, SchemaVersion, StreamId, TableId
from millstream.model.names import parse_qualified_name, qualified_name
from millstream.model.positions import Seq, StreamToken, short_stream_id
from millstream.model.schema import TableKind, TableSchema
from millstream.private_files import UNFINISHED, make_folder, replacing
from millstream.regions.declared_merges import check_forms, merge_of
from millstream.regions.region_folders import check_region, region_logs
from millstream.regions.state_files import mapped, merge_file
from millstream.wal.cross_region_duplicates import RepeatedWrites, is_repeat, spans_of
from millstream.wal.reader import StreamReader, TableRecords
from millstream.wal.truncation_check import end_at, still_says
from millstream.wal.truncation_watch import HistoryWatch

if TYPE_CHECKING:
    from millstream.home.home import Home

_FOLD_ROWS: Final = 250_000
"""Number of records to read before folding them, or as many as there are rows already, so that no row is
folded over and over. In addition only one row per key and region is in memory."""


Known: TypeAlias = Callable[[pa.Table], pa.Table]
"""Returns the known region rows that have a key of some records."""


@dataclass(frozen=True, slots=True)
class Reconciled:
    """The result of `reconcile` for one table and region."""

    table: str
    region: RegionId
    is_own: bool
    rows: int
    """Number of the region's rows that were missing."""
    after: Seq
    upto: Seq
    """The region's numbers that were read, `(after, upto]`."""
    begins_at: Seq | None
    """The first number that retention has left, if it has dropped records that were never merged."""
    is_anew: bool = False
    """Whether the log had lost its merged tail, or was recreated, so that it was read again."""

    def as_dict(self) -> dict[str, Any]:
        """Return the result, JSON-able."""
        return {
            "table": self.table,
            "region": int(self.region),
            "own": self.is_own,
            "rows": self.rows,
            "after": int(self.after),
            "upto": int(self.upto),
            "begins_at": None if self.begins_at is None else int(self.begins_at),
            "anew": self.is_anew,
        }


class RegionTable:
    """One table of a stream, as its regions have written it.

    Args:
        bytes_max: limit in bytes of the rows that one read holds at once, and again of records that
            aren't folded yet; None for no limit.
        with_kept: whether to use the kept state, which takes time to open. Without it, only `state_after`
            and `advanced` may be called.
        repeated: the writes known so far that regions have twice, to read only on; None to read all of them.

    Raises:
        LakeError (`query_memory_full`): the kept state alone is larger.
        UnknownTable: no region has records of it.
        ReplicationError (`merge_unsuitable`): it can't merge as configured.
        ReplicationError (`other_region`): a log belongs to another region than its folder.
    """

    def __init__(
        self,
        home: Home,
        stream: str,
        table: str,
        *,
        bytes_max: int | None = None,
        with_kept: bool = True,
        repeated: RepeatedWrites | None = None,
    ) -> None:
        config = home.configured(stream)
        self._file: Final = merge_file(home, stream, table)
        self.bytes_max: Final = bytes_max
        self._repeated = repeated or RepeatedWrites()
        with contextlib.suppress(FileNotFoundError):
            self._check_fits(self._file.stat().st_size, table)
        self._folders: Final = region_logs(home, stream, config)
        self._readers = {region: self._open(region) for region in self._folders}
        self._watches = {region: HistoryWatch() for region in self._folders}
        self._own = next(iter(self._readers))
        self.name: Final = qualified_name(*parse_qualified_name(table))
        # Before the schemas: records that come after them may have others, and are read another time.
        self._known_upto = {region: self._end_of(region) for region in self._readers}
        self._versions = {region: reader.schema_versions() for region, reader in self._readers.items()}
        schemas = {region: list(self._schemas(found)) for region, found in self._versions.items()}
        # By the regions' numbers, not this home's region first: so all regions show one order of columns.
        known = [schema for region in sorted(schemas) for schema in schemas[region]]
        kept = self._kept_table() if with_kept else None
        if not known and kept is None:
            raise UnknownTable(f"no region of {stream} has records of {table}", table=table)
        # If retention has dropped all records of a table, only the kept state knows its schema.
        found_key = known[-1].key if known else kept[0] if kept else ()
        key = found_key if config is None else key_of(config, self.name) or found_key
        for region, found in schemas.items():
            for schema in found:
                if schema.source != 0:
                    raise ReplicationError(
                        f"{self.name} is captured in region {region}: only tables that applications write merge",
                        code="merge_unsuitable",
                        table=self.name,
                    )
                if schema.key != key:
                    raise ReplicationError(
                        f"{self.name} has the key {', '.join(schema.key) or 'none'} in region {region}, and {', '.join(key) or 'none'} here",
                        code="merge_unsuitable",
                        hint="Give the table the same key in all regions: [streams.S.keys].",
                        table=self.name,
                    )
        merge = merge_of(config, self.name)
        check_forms(self.name, known, merge)
        columns = [schema.to_arrow() for schema in known]
        self.columns: Final = union_of(self.name, columns if kept is None else [*columns, kept[1]])
        merge.check(self.name, self.columns, key, whole=False)  # a column comes with the first row that has it
        self.engine: Final = ReconciliationEngine(key, merge, self.name)
        self.unwritten: Final = tuple(name for name in merge.mentioned if name not in self.columns.names)
        """Columns that the configuration merges and no region has: they come with their first row, or are misspelt."""
        self._ids = {region: {schema.table_id for schema in found} for region, found in schemas.items()}
        self.own_schema: Final = max(schemas[self._own], key=lambda schema: schema.version, default=None)
        """The table's newest schema in the home's own region; None if it has no records of it."""

    @property
    def folders(self) -> Mapping[RegionId, str]:
        """Return the folders of the regions' logs."""
        return self._folders

    @property
    def stream_id(self) -> StreamId:
        """Return the id of the stream in the home's own region."""
        return self._readers[self._own].stream_id

    @property
    def regions(self) -> tuple[RegionId, ...]:
        """Return the regions whose logs the home has, its own first."""
        return tuple(self._readers)

    @property
    def empty(self) -> RegionState:
        """Return the empty state."""
        # Not by `empty_table`: that looks for pandas, whose import takes half a second.
        return RegionState(pa.Table.from_batches([], state_schema(self.columns, self.engine.merge)))

    def state_of(self, region: RegionId, after: Seq = Seq(0), *, known: Known | None = None) -> RegionState:
        """Return the state from a region's log after a number; the vector gives its end.

        Args:
            known: returns the region rows as of that number that have a key of some records; needed if columns
                accumulate. The state has them too.

        Raises:
            OffsetExpired: retention has dropped what follows `after`.
        """
        while True:
            # A concurrent cut of the log leaves the beginning of one history here, and the end of another
            # one or none.
            with contextlib.suppress(TokenFromFuture, LogTruncated):
                state = self._read(region, after, known)
                if region not in state.ends or self._still_says(state, region):
                    return state
            self._readers[region] = self._open(region)

    def _read(self, region: RegionId, after: Seq, known: Known | None) -> RegionState:
        reader = self._readers[region]
        try:
            upto = min(reader.persisted_upto(), max(self._known_upto[region], after))
            vector = {region: StreamToken.scalar(reader.stream_id, upto)}
        except LogError:
            return self.empty  # nothing has come yet
        end = end_at(reader, upto)
        rows = self.empty.rows
        waiting: list[pa.Table] = []
        for part in self._parts(region, after, upto):
            waiting.append(lift(part.batch, part.hybrid_ns, region, self.columns, self.engine.merge, table=self.name))
            if sum(one.num_rows for one in waiting) >= max(_FOLD_ROWS, rows.num_rows) or self._is_much(waiting):
                rows, waiting = self._folded(rows, waiting, known), []
                self._check_fits(rows.nbytes, self.name)
        rows = self._folded(rows, waiting, known)
        self._check_fits(rows.nbytes, self.name)
        return RegionState(rows, vector, {} if end is None else {region: end})

    def _is_much(self, waiting: list[pa.Table]) -> bool:
        return self.bytes_max is not None and sum(one.nbytes for one in waiting) > self.bytes_max

    def check_fits(self, state: RegionState) -> None:
        """Raise `LakeError` (`query_memory_full`) if a state has more bytes than may be held."""
        self._check_fits(state.rows.nbytes, self.name)

    def _check_fits(self, size: int, table: str) -> None:
        if self.bytes_max is not None and size > self.bytes_max:
            raise LakeError(
                f"{table}, merged, has more than {self.bytes_max} bytes",
                code="query_memory_full",
                hint="Read it on the home's machine (`millstream.open`), or raise `[http] query_memory_bytes_max` there.",
                size_max=self.bytes_max,
            )

    def _open(self, region: RegionId) -> StreamReader:
        """Return a reader of a log as it is now."""
        return StreamReader(self._folders[region])

    def _still_says(self, state: RegionState, region: RegionId) -> bool:
        """Return whether a region's current log has all of a state's records; later reads use the new reader."""
        reader = self._readers[region] = self._open(region)
        return still_says(reader, behind(state.vector, region), state.ends.get(region))

    def _folded(self, rows: pa.Table, records: list[pa.Table], known: Known | None) -> pa.Table:
        """Return rows with records that follow them; a key that isn't among the rows begins as it is known."""
        new = pa.concat_tables([self.empty.rows, *records])
        if known is not None and new.num_rows:
            rows = pa.concat_tables([rows, widened(known(new), rows.schema)])
        return fold(rows, self.engine.key, self.engine.merge, records=new)

    def _parts(self, region: RegionId, after: Seq, upto: Seq) -> Iterator[TableRecords]:
        reader, wanted = self._readers[region], self._ids[region]
        start = max(after, Seq(reader.first_seq() - 1)) if after == 0 else after
        if not wanted or start >= upto:
            return
        for part in reader.read_between(start, upto, table=next(iter(wanted)) if len(wanted) == 1 else None):
            if part.schema.table_id in wanted:
                check_region(part.region, region)
                yield part

    def _schemas(self, versions: Mapping[tuple[TableId, SchemaVersion], TableSchema]) -> Iterator[TableSchema]:
        """Yield the versions of the table among those of all tables of a log."""
        wanted = parse_qualified_name(self.name)
        for schema in versions.values():
            if schema.kind is TableKind.TABLE and (schema.namespace, schema.name) == wanted:
                yield schema

    def merged_state(self, *, take: list[Reconciled] | None = None) -> RegionState:
        """Return the merged state of all regions' logs: the kept state, and the records after it.

        Args:
            take: receives what was taken of each region, and where records were dropped before they were
                merged: the rest is taken all the same then, and a recreated log in place of its earlier rows.

        Raises:
            OffsetExpired: records were dropped, and `take` is None.
            ReplicationError (`other_stream`): a region's log was recreated after the state was kept, and `take` is None.
            MergeStateUnreadable: the kept state is damaged.
            ReplicationError (`merge_unsuitable`): columns merge differently than before, and retention has dropped the records
                to rebuild from.
            ReplicationError (`lost_tail_merged`): a region has lost its merged tail, and retention has dropped the records to
                read again.
        """
        state = self._kept()
        if state is None:
            self._check_can_begin_anew()
            state = self.empty
        before = state.vector
        for region in self.regions:
            reader = self._readers[region]
            other_log = self._other_log(state, region, reader)
            if other_log is not None:
                if take is None:
                    raise other_log
                state, before = self._without_earlier_log(state, region), {}
            after = behind(state.vector, region)
            first = reader.first_seq() if take is not None or after == 0 else Seq(0)
            lost = first if first > after + 1 else None
            known = self.known_in(state.rows.filter(pc.equal(state.rows.column(REGION.name), int(region))))
            heard = self.state_of(region, after if lost is None else Seq(lost - 1), known=known)
            # Checked after the read: the log can be cut at any moment, and later reads of it belong to
            # its new history.
            is_anew = not self._still_says(state, region)
            if is_anew:
                state, heard = self._without_lost_tail(state, region)
                after, lost, before = behind(state.vector, region), None, {}
            is_anew |= other_log is not None
            lacking = self.engine.missing(heard, state.vector)
            del heard
            if take is not None:
                upto = behind(lacking.vector, region)
                own = region == self._own
                take.append(Reconciled(self.name, region, own, lacking.rows.num_rows, after, upto, lost, is_anew))
            state = self.engine.apply(state, lacking)
            del lacking
            self._check_fits(state.rows.nbytes, self.name)
        return self.widened(self._without_repeats(before, state))

    def _without_repeats(self, before: Vector, state: RegionState) -> RegionState:
        """Return a state that subtracts the writes that regions have twice, of those received after a vector."""
        if not self.engine.merge.accumulates or len(self.regions) < 2:
            return state
        rows = []
        for region, repeats in self._repeated.between(self._readers, before, state.vector).items():
            for part in (one for span in spans_of(repeats) for one in self._parts(region, *span)):
                new = lift(part.batch, part.hybrid_ns, region, self.columns, self.engine.merge, table=self.name)
                rows.append(new.filter(pa.array(is_repeat(repeats, whole_column(new.column(SEQ.name)).to_numpy()))))
        if not rows:
            return state
        less = subtractions(pa.concat_tables(rows), self.engine.key, self.engine.merge)
        return self.engine.apply(state, Missing(less, state.vector, state.ends))

    def states_apart(self) -> dict[RegionId, RegionState]:
        """Return the state of each region alone, the home's own first. Raises as `merged_state`."""
        if not self.engine.merge.accumulates:
            return {region: self.state_of(region) for region in self.regions}
        # The logs have only what was added since retention dropped their beginnings.
        whole = self.merged_state(take=[])
        return {
            region: RegionState(
                whole.rows.filter(pc.equal(whole.rows.column(REGION.name), int(region))),
                {region: whole.vector[region]} if region in whole.vector else {},
                {region: whole.ends[region]} if region in whole.ends else {},
            )
            for region in self.regions
        }

    def together(self, one: RegionState, other: RegionState) -> RegionState:
        """Return the state of two regions together, each as `states_apart` returns it: a write that both have counts once."""
        joined = self.engine.apply(one, self.engine.plan(one, other).to_local)
        return self._without_repeats({}, joined)

    def widened(self, state: RegionState) -> RegionState:
        """Return a state with all columns that the table has now."""
        columns = union_of(self.name, [self.columns, own_columns(state.rows.schema)])
        return RegionState(widened(state.rows, state_schema(columns, self.engine.merge)), state.vector, state.ends)

    def state_after(self, vector: Vector, ends: Ends, *, known: Known | None = None) -> RegionState | None:
        """Return what all regions' logs have after a vector; None if they don't continue it.

        That is so if retention has dropped records after it, or if a log was cut back or recreated since.

        Args:
            ends: the groups at which it ends.
            known: returns the region rows as of the vector that have a key of some records; needed if columns
                accumulate.
        """
        before = RegionState(self.empty.rows, vector, ends)
        state = self.empty
        try:
            for region in self.regions:
                token, after = vector.get(region), behind(vector, region)
                reader = self._readers[region]
                if token is not None and token.stream != short_stream_id(reader.stream_id):
                    return None
                if not after and reader.first_seq() > 1:
                    return None
                heard = self.state_of(region, after, known=known)
                # After the read, as in `merged_state`.
                if not self._still_says(before, region):
                    return None
                state = self.engine.apply(state, Missing(heard.rows, heard.vector, heard.ends))
            return self._without_repeats(vector, state)
        except OffsetExpired:
            return None

    def watch(self) -> None:
        """Begin to watch the logs for cuts, before the read of the first state for `advanced`."""
        for region in self.regions:
            with contextlib.suppress(LogError):  # nothing has come yet
                self._is_other(region)

    def advanced(self, state: RegionState) -> RegionState | None:
        """Return a state with what the logs have after it, read by readers that know the logs up to there.

        Args:
            state: what `merged_state`, `state_after` or this returned last, since `watch`.

        Returns:
            None if the logs can't simply be read on: one may have been cut back since, or it has new columns, or
            retention has dropped what follows.
        """
        before = state.vector
        try:
            for region in self.regions:
                after, upto = behind(state.vector, region), self._end_of(region)
                if upto < after or not still_says(self._readers[region], after, state.ends.get(region)):
                    return None
                if upto == after:
                    continue
                if self._has_new_columns(region, after, upto):
                    return None
                self._known_upto[region] = upto
                heard = self._read(region, after, self.known_in(state.rows))
                # After the read: a log that was cut before or during it isn't the one that the state is of.
                if self._is_other(region):
                    return None
                state = self.engine.apply(state, self.engine.missing(heard, state.vector))
                self._check_fits(state.rows.nbytes, self.name)
            if state.vector != before:
                state = self._without_repeats(before, state)
                if any(self._is_other(region) for region in self.regions):
                    return None
        except (LogError, PositionError):
            return None
        return state

    def _end_of(self, region: RegionId) -> Seq:
        with contextlib.suppress(LogError):
            return self._readers[region].persisted_upto()
        return Seq(0)  # nothing has come yet

    def _is_other(self, region: RegionId) -> bool:
        """Return whether a log may have been cut back since the last call."""
        return self._watches[region].is_other(self._readers[region].extent.marks()[0])

    def _has_new_columns(self, region: RegionId, after: Seq, upto: Seq) -> bool:
        """Return whether there are versions of the table that this object doesn't know."""
        found = self._readers[region].schemas_between(after, upto, self._versions[region])
        self._versions[region] |= found
        return any(self._schemas(found))

    def _without_lost_tail(self, state: RegionState, region: RegionId) -> tuple[RegionState, RegionState]:
        """Return a state without what a region's log no longer has, and with everything that the log has.

        Rows that the log still has stay, and so do rows from before the retained part: nothing else can
        be known of them.
        """
        rows, end = state.rows, state.ends.get(region)
        regions, seqs, walls = (whole_column(rows.column(one.name)).to_numpy() for one in (REGION, SEQ, WALL))
        while True:
            heard = self.state_of(region)
            reader = self._readers[region]
            first, upto = reader.first_seq(), behind(heard.vector, region)
            at = np.flatnonzero((regions == int(region)) & (seqs >= first))
            at = at[np.argsort(seqs[at])]
            lost = np.zeros(len(seqs), bool)
            lost[at] = True
            with contextlib.suppress(TokenFromFuture, LogTruncated):  # cut once more, as is seen below
                for part in self._parts(region, Seq(first - 1), upto) if first > 1 and len(at) else ():
                    if end is not None and part.epoch > end.epoch:
                        break  # written since; after a clock was set back it may have a lost record's number and time
                    numbers = whole_column(part.batch.column(SEQ.name)).to_numpy()
                    found = at[np.searchsorted(seqs[at], numbers).clip(max=len(at) - 1)]
                    lost[found[(seqs[found] == numbers) & (walls[found] == part.hybrid_ns.to_numpy())]] = False
            rebuilt = heard
            if self.engine.merge.accumulates:
                # Rows are left if retention has dropped a part of what they have accumulated.
                left = (regions == int(region)) & ~lost
                rebuilt = self.state_of(region, known=self.known_in(rows.filter(pa.array(left))))
            if region not in heard.ends or self._still_says(heard, region):
                break
        if first > 1 and lost.any():
            raise ReplicationError(
                f"{self.name} was merged with records of region {region} that were lost there since ({np.count_nonzero(lost)} rows), and retention has "
                f"dropped what those rows were before: what region {region} wrote before number {first}",
                code="lost_tail_merged",
                hint=f"Wait if this home's copy of that log is being rebuilt; otherwise move {self._file} away and run "
                "`millstream reconcile`.",
                table=self.name,
                region=int(region),
            )
        # Subtractions whose records the logs have are found again.
        for other, reader in self._readers.items():
            at = regions == subtracting_region(np.full(len(seqs), int(other)), seqs)
            lost |= at & (seqs >= (first if other == region else reader.first_seq()))
        return self.engine.without(state, region, lost), rebuilt

    def known_in(self, rows: pa.Table) -> Known | None:
        """Return what looks up some rows for `state_of` and `state_after`; None if no column accumulates."""
        if not self.engine.merge.accumulates:
            return None
        return lambda records: of_keys(widened(rows, records.schema), records, self.engine.key)

    def _other_log(self, state: RegionState, region: RegionId, reader: StreamReader) -> ReplicationError | None:
        """Return an error if a region's log isn't the one that a state has received."""
        token = state.vector.get(region)
        if token is None or token.stream == short_stream_id(reader.stream_id):
            return None
        return ReplicationError(
            f"{self.name}: the log of region {region} was made again: it was {token}, and is {reader.token()}",
            code="other_stream",
            hint=f"Run `millstream reconcile {self.name}`: it drops the rows of the earlier log, and keeps the other regions'.",
            region=int(region),
        )

    def _without_earlier_log(self, state: RegionState, region: RegionId) -> RegionState:
        """Return a state without the rows of a region whose log was recreated; the others' rows stay.

        Subtractions are found again. With three or more regions, those whose records retention has dropped stay.
        """
        regions, seqs = (whole_column(state.rows.column(one.name)).to_numpy() for one in (REGION, SEQ))
        lost = regions == int(region)
        for other, reader in self._readers.items():
            first = 0 if other == region or len(self.regions) == 2 else reader.first_seq()
            lost |= (regions == subtracting_region(np.full(len(seqs), int(other)), seqs)) & (seqs >= first)
        return self.engine.without(state, region, lost)

    def kept_rows(self) -> tuple[Seq, pa.Table] | None:
        """Return the own region's rows of the kept state, and the number up to which they were read.

        None if there is no usable state, or the log no longer has what was read.
        """
        state = self._kept()
        if state is None or self._own not in state.vector or not self._still_says(state, self._own):
            return None
        rows = state.rows.filter(pc.equal(state.rows.column(REGION.name), int(self._own)))
        return state.vector[self._own].linear(), rows.select(own_columns(rows.schema).names)

    def keep(self, state: RegionState) -> None:
        """Keep a state, durably, for the next read. One process of a home does so at a time."""
        make_folder(self._file.parent)
        for left in self._file.parent.glob(f"{UNFINISHED}*"):  # by a process that was killed
            left.unlink(missing_ok=True)
        with replacing(self._file) as output:
            self.engine.write(state, output.write)

    def _check_can_begin_anew(self) -> None:
        """Refuse to rebuild an unusable kept state if the logs have less."""
        try:
            heard = vector_of(mapped(self._file))
        except FileNotFoundError:
            return
        for region, reader in self._readers.items():
            if region in heard and reader.first_seq() > 1:
                raise ReplicationError(
                    f"{self.name} was merged by other rules or another key so far, and can't be rebuilt by the present ones: retention has dropped what region "
                    f"{region} wrote before number {reader.first_seq()}",
                    code="merge_unsuitable",
                    hint=f"Restore [streams.S.merge] and the key, or move {self._file} away to continue without the dropped "
                    "records.",
                    table=self.name,
                    region=int(region),
                )

    def _kept_table(self) -> tuple[tuple[str, ...], pa.Schema] | None:
        """Return the key and the columns of the kept state; None if there is none."""
        try:
            return table_in(mapped(self._file))
        except FileNotFoundError:
            return None

    def _kept(self) -> RegionState | None:
        """Return the kept state; None if there is none, or if columns merge differently now."""
        try:
            data = mapped(self._file)
        except FileNotFoundError:
            return None
        return self.engine.decode(data)

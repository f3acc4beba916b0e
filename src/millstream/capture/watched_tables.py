"""The source's tables, watched: a look at its catalogs updates the publications and the tables' states.

It compares the source's tables with the publications and the catalog:

- Tables that appeared join both; tables that left are noticed.
- Replica identities that came or went change a table's state.
- Columns, keys and partitions that changed have the table copied again.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

import structlog

from millstream.capture.column_rules.binding import RULES, ColumnRules
from millstream.capture.column_rules.rows_before_rules import note_raw_values
from millstream.capture.config import CaptureConfig
from millstream.capture.connection import Connection
from millstream.capture.copying.attached_partitions import begin_copy_of, can_copy_apart
from millstream.capture.leaves.leaf_relations import HeldTables
from millstream.capture.leaves.sent_by_leaves import publish_leaves, reads_leaves, sent_by_leaves
from millstream.capture.publication import (
    DECIDES_AGAIN_FROM,
    Coverage,
    Restriction,
    covered_tables,
    decide_again,
    deciding_again,
    inserts_name,
    list_published,
    memberships,
    publish_generated,
    restrictions,
    sync_publications,
)
from millstream.capture.rewrite_detection import KnownLayouts, shape_of
from millstream.capture.source_tables import (
    SourceTable,
    dropped,
    insert_lsn,
    source_time_us,
)
from millstream.capture.streamed_publications import StreamedPublications
from millstream.capture.table_directory import TableDirectory
from millstream.capture.table_states import after_identity_change, copy_or_history_only, quarantine
from millstream.capture.transient_column_names import Expected, Form, Shape, Shown
from millstream.catalog import Catalog, ChunkState, TableRow, TableState
from millstream.errors import SourceError
from millstream.model.ids import TableId
from millstream.model.names import TablePatterns, qualified_name
from millstream.model.positions import Lsn

NOT_PUBLISHED: Final = "publication"
"""Cause in a set-aside table's details: no publication sends it completely."""
NO_TRUNCATES: Final = "truncates"
"""Cause in a captured table's details: no publication sends its truncates."""

_TORN_MAX: Final = 5
"""How often a look begins because definitions change while it reads them."""
_TORN: Final = frozenset({"source_deadlock", "source_relation_gone"})
"""Errors of a look that a DROP or DETACH of the application's met."""

logger = structlog.get_logger("millstream.capture")


def _columns(tables: Iterable[SourceTable]) -> dict[int, object]:
    return {table.oid: (table.namespace, table.name, table.layout, table.relation) for table in tables}


class WatchedTables:
    """The source's tables and their rows in the catalog, which `look` updates."""

    def __init__(
        self,
        config: CaptureConfig,
        catalog: Catalog,
        directory: TableDirectory,
        rules: ColumnRules,
        streamed: StreamedPublications,
    ) -> None:
        self._config = config
        self._rules = rules
        self._catalog = catalog
        self.streamed = streamed
        """The publications of the session."""
        self._directory = directory
        self._patterns = TablePatterns.parse(config.tables)
        self._leaving: dict[int, Lsn] = {}
        """Tables that the last look missed, by OID, each with the LSN from which on it is given up."""
        self._stream = catalog.stream(config.stream).id
        self._layouts = KnownLayouts(catalog, self._stream, config.rules)
        self.facts: dict[int, SourceTable] = {}
        self.seen_at = Lsn(0)
        """LSN at or above every change that led to `facts`."""
        self._seen_us = 0
        """The time then, by the source's clock."""
        self.coverage = Coverage((), frozenset(), {}, {})
        self._leaves_published = False
        """Whether publications of an older version were altered at the session's start."""
        self._held = HeldTables(directory.leaves)
        self.are_deferred = False
        """Whether a table waits to be captured, because it may be a partition that left."""
        self._attached = frozenset[TableId]()
        """Tables with attached partitions whose rows wait for their copy, as of the last look."""
        self._decided = frozenset[tuple[int, int, bool]]()
        """Partitions that came or went, of which the stream has decided again, as `KnownLayouts.partitions_since` returns them."""
        self._whole: object = None
        """The columns that the last look read, as `_columns` returns them, and the restrictions of the publications."""

    def waits_for_look(self) -> bool:
        """Return whether the log has records that only another look can explain, or lacks rows of partitions; have it soon then.

        Both wait while their table is being copied; with the copy, if that is paused. A look is also needed to give up a table
        that the last one missed.
        """
        attached, rows = self._attached, self._directory.rows()
        leaves = self._directory.leaves.known
        if self.are_leaving or leaves.late_leaves > leaves.looked_for or (self.are_deferred and not leaves.are_waiting):
            self._directory.look_wanted.set()
            return True
        waiting = self._directory.shown.waiting | attached
        if any(row.id in waiting and row.state is TableState.STREAMING for row in rows):
            self._directory.look_wanted.set()
            return True
        copied = {row.id for row in rows if row.id in waiting and row.state is TableState.COPYING}
        return bool(copied) and not copied <= self._catalog.paused_copies(self._stream)

    @property
    def are_leaving(self) -> bool:
        """Whether a table is given up once the stream has passed where the last look missed it."""
        return bool(self._leaving)

    def look(self, connection: Connection, passed: Lsn) -> None:
        """Bring publications, catalog and directory in step with the source's tables.

        Args:
            passed: how far the stream is in the log; a missing table is given up once the log has all its changes.

        Raises:
            SourceError: as their messages say; changes made before the error persist.
        """
        for left in reversed(range(_TORN_MAX)):
            try:
                if self._look(connection, passed):
                    return
            except SourceError as error:
                if error.code not in _TORN or not left:
                    raise
        self._directory.look_wanted.set()

    def _look(self, connection: Connection, passed: Lsn) -> bool:
        """Look, unless a definition changes between two of the statements: return False then, and settle nothing."""
        shown = self._directory.shown.begin_look(passed)
        known = self._directory.leaves.known
        late_leaves, begun, by_leaves = known.late_leaves, known.begin_look(), self._by_leaves(connection)
        self._alter_publications(connection)
        published = self._published(connection)
        tables = [self._rules.applied(table) for table in self._held.without(connection, published, passed)]
        self.facts = {table.oid: table for table in tables}
        self.seen_at, self._seen_us = insert_lsn(connection), source_time_us(connection)
        self._directory.learn(self.facts)
        rows = {row.relation_oid: row for row in self._directory.refresh()}
        before = covered_tables(connection, self._config.publication, tables)
        self._request_missed(rows, before)
        try:
            self.coverage = sync_publications(connection, self._config.publication, tables, self.streamed)
        except SourceError as error:
            if error.code == "publication_missing":
                for table in tables:
                    if table.oid in rows and table.oid not in before:
                        self._set_unsent_aside(self._directory.table_row(table), error.message, error.hint)
                self._directory.refresh()
            raise
        sent = restrictions(connection, self.coverage.publications)
        members = memberships(connection, self.coverage.publications, tables)
        if not self._is_whole(connection, published, sent):
            return False
        # A copy that begins after this look has everything from before the publication's change.
        requested = [o for o in self.facts if o not in rows or rows[o].state is TableState.COPY_REQUESTED]
        settings = self._by_leaves(connection)
        are_by_leaves = by_leaves.keys() | settings.keys() & {*requested}
        gone = dropped(connection, known.detached)
        take = partial(known.look, at=self.seen_at, at_us=self._seen_us, begun=begun, own=rows, gone_for_good=gone)
        left, expected = dict[TableId, Sequence[Shown]](), dict[TableId, Expected]()
        numbers = dict[TableId, Mapping[Form, tuple[int, ...]]]()
        for table in tables:
            row, is_by_leaves = self._directory.table_row(table), table.oid in are_by_leaves
            if table.refusal is not None:
                self._directory.refuse(table.oid, table.namespace, table.name, table.refusal)
                take(row.id, table, by_leaves=is_by_leaves, setting=settings.get(table.oid, ""))
                continue
            restriction = sent.get((table.namespace, table.name)) or Restriction()
            now = shape_of(table, restriction, self.seen_at)
            # A copy that has ended since the look began has voided the records that it took forms of.
            forms = () if self._directory.shown.has_forgotten(row.id) else shown.get(row.id, ())
            numbers[row.id] = self._layouts.numbers(row.id, now, forms) if forms else {}
            member = members.get(table.oid, set())
            left[row.id], expected[row.id] = self._settle_layout(
                table, row, restriction, member, now, forms, by_leaves=is_by_leaves, setting=by_leaves.get(table.oid)
            )
            take(row.id, table, by_leaves=is_by_leaves, setting=settings.get(table.oid, ""))
            self._settle(table, row)
        known.end_look(begun, late_leaves)
        self._directory.definitions.end_look(left)
        self._notice_leaving(connection, rows.values(), passed)
        self._directory.refresh()
        self._attached, self.are_deferred = self._layouts.with_attached(), len(tables) < len(published)
        # Last: capture ends only once every form is explained, and the table's state shows a copy that this requests.
        self._directory.shown.end_look({table: forms for table, forms in left.items() if forms}, expected, numbers)
        return True

    def _request_missed(self, rows: Mapping[int, TableRow], before: Collection[int]) -> None:
        """Request another copy of captured tables some of whose changes aren't in the log as theirs."""
        own = self._directory.leaves.known.live.intersection(self.facts)
        for oid, row in rows.items():
            # It left the publication and will rejoin: changes in between weren't sent. Record that first.
            if oid in self.facts and oid not in before and row.state in {TableState.STREAMING, TableState.COPYING}:
                self._catalog.set_state(row.id, TableState.COPY_REQUESTED, "it had left the publication")
            elif oid in own:
                self._directory.request_copy_again(row, self.facts[oid], "it was a partition for a while")

    def _alter_publications(self, connection: Connection) -> None:
        """Let our publications send generated columns, and leaf partitions under their own OIDs, which the directory takes."""
        try:
            publish_generated(connection, self._config.publication)
        except SourceError as error:
            logger.warning("generated columns couldn't be published yet", code=error.code, error=error.message)
        if not self._directory.leaves.takes_leaves or self._leaves_published:
            return
        self._leaves_published = True  # whoever alters that later decides
        try:
            publish_leaves(connection, (self._config.publication, inserts_name(self._config.publication)))
        except SourceError as error:
            logger.warning("partitions couldn't be published apart yet", code=error.code, error=error.message)

    def _by_leaves(self, connection: Connection) -> dict[int, str]:
        """Let the directory take leaf partitions if the publications are ours; return the tables as `sent_by_leaves` does."""
        names = (self._config.publication, inserts_name(self._config.publication))
        self._directory.leaves.takes_leaves = reads_leaves(connection, names)
        return sent_by_leaves(connection, names) if self._directory.leaves.takes_leaves else {}

    def _published(self, connection: Connection) -> list[SourceTable]:
        published = list_published(connection, self._patterns, self._config.publication)
        if connection.info.server_version < DECIDES_AGAIN_FROM:
            published = self._decided_again(connection, published)
        return published

    def _decided_again(self, connection: Connection, published: list[SourceTable]) -> list[SourceTable]:
        """Let the stream decide again what it sends if partitions came or went; return the tables as they are after that.

        A copy that begins where this look ends has what the stream left out before, and voids what it sent in excess.
        """
        ids = {row.relation_oid: row.id for row in self._directory.rows()}
        names = (self._config.publication, inserts_name(self._config.publication))
        while True:
            captured = [table for table in published if table.oid in ids]
            since = {table.full_name: self._layouts.partitions_since(table, ids[table.oid]) for table in captured}
            since = {name: new for name, found in since.items() if (new := found - self._decided)}
            if not since:
                return published
            if not decide_again(connection, names):
                logger.warning(
                    "the source may send too much or too little of partitions that came or went",
                    tables=list(since),
                    hint=f"Have the owner run: {deciding_again(connection, names[0])} Then run `millstream tables copy` for each.",
                )
            self._decided |= frozenset().union(*since.values())
            published = list_published(connection, self._patterns, self._config.publication)

    def _is_whole(
        self, connection: Connection, published: Sequence[SourceTable], sent: Mapping[tuple[str, str], Restriction]
    ) -> bool:
        """Return whether columns and restrictions are of one moment, though several statements read them.

        A column may have got the name of one that was dropped in between: joined by name, they would make a table that
        never was, and records would get the number of the dropped column. So what is new is read twice.
        """
        found = _columns(published), sent
        if found != self._whole:
            again = list_published(connection, self._patterns, self._config.publication)
            if _columns(again) != found[0]:
                logger.debug("definitions change during a look; it begins again")
                return False
            self._whole = found
        return True

    def _settle(self, table: SourceTable, row: TableRow) -> None:
        """Update a table's state after a change of its identity or of the publications."""
        if table.oid not in self.coverage.oids:
            why = self.coverage.refused.get(table.oid, f"no publication sends it ({self._config.publication})")
            self._set_unsent_aside(row, why)
        elif row.state is TableState.QUARANTINED and row.details.get("cause") == RULES:
            if row.details.get("code") != "layout_unclear":
                self._catalog.set_state(row.id, TableState.COPY_REQUESTED, "its rules can be applied now")
        elif row.state is TableState.QUARANTINED and row.details.get("cause") == NOT_PUBLISHED:
            state, reason = copy_or_history_only(usable=table.usable, reason="a publication sends it now")
            self._catalog.set_state(row.id, state, reason)
        elif (changed := after_identity_change(row, usable=table.usable)) is not None:
            state, reason = changed
            if state is TableState.HISTORY_ONLY:
                logger.warning("table in history only", table=table.full_name, reason=reason)
            self._catalog.set_state(row.id, state, reason)
        elif row.state is TableState.STREAMING:
            self._settle_truncates(table, row)

    def _set_unsent_aside(self, row: TableRow, why: str, hint: str = "") -> None:
        """Quarantine a table that no publication sends; it is copied once one does."""
        ours = row.details.get("cause") == NOT_PUBLISHED
        if row.state is not TableState.QUARANTINED or (ours and row.reason != why):
            quarantine(self._catalog, row, why, details={"cause": NOT_PUBLISHED, "hint": hint})

    def _settle_layout(
        self,
        table: SourceTable,
        row: TableRow,
        sent: Restriction,
        members: set[str],
        now: Shape,
        shown: Sequence[Shown],
        *,
        by_leaves: bool,
        setting: str | None,
    ) -> tuple[Sequence[Shown], Expected]:
        """Request a copy of a table if its existing rows, or the part that is sent, changed with its definition.

        Return the forms of records that the next look has to explain, and the form that it expects. In other states than these two, the table's
        records don't count, or a copy comes that follows them.
        """
        is_plain = row.state is TableState.STREAMING and not self._config.copies_renamed
        renamed = self._layouts.renamed(table, row.id) if is_plain else {}
        has_names = bool(renamed) or any(one.form != now.form for one in shown)
        follows = is_plain and has_names and self._directory.follows_names(row.id)
        joined = self._layouts.attached(table, row.id)
        attached = [partition for partition in joined if partition.size_bytes]
        # Rows that a missed truncate left behind need a copy of the whole table, once truncates are sent.
        apart = row.details.get("cause") != NO_TRUNCATES and can_copy_apart(table, attached)
        added = self._layouts.added_defaults(table, row.id, sent) if row.state is TableState.STREAMING else {}
        if added and not self._directory.follows_names(row.id):
            added = {}
        leaves = self._directory.leaves.known
        told_by_x = by_leaves and leaves.is_whole(row.id) and not self._copies_partition_that_left(table, row)
        news = self._layouts.news(
            table,
            row.id,
            sent,
            members,
            follows=follows,
            apart=apart,
            told=added,
            returned=leaves.returned(row.id, table),
            departures_told=told_by_x,
            truncates_told=by_leaves and leaves.was_always_read_by_leaves(row.id, setting),
        )
        if news is None and row.state is TableState.STREAMING and self._directory.lacks_defaults(row.id):
            news = "records lack the numbers of its columns, of which one was added with a default"
        left: Sequence[Shown] = ()
        odd: Shown | None = None
        if news is None and row.state is TableState.STREAMING:
            found = self._layouts.explained(row.id, now, shown, follows=follows)
            news, left, odd = found.news, found.left, found.odd
        elif news is None and row.state is TableState.COPYING:
            left = shown
        else:
            shown = ()
        renamed = renamed | self._layouts.renamed_since(row.id, now, shown) if follows else {}
        if news is not None:
            self._directory.request_copy_again(row, table, news)
        elif renamed or added:
            # The log's last record of the table may have other names, and lack a new column.
            if added:
                self._directory.defaults.note(row.id, added)
            filled = {default.name: default.text for default in added.values()}
            self._directory.definitions.note(row.id, renamed, filled)
        is_streaming = news is None and row.state is TableState.STREAMING
        self._directory.definitions.look(row.id, table, self.seen_at, is_streaming=is_streaming)
        if news is not None or row.state not in {TableState.STREAMING, TableState.COPYING}:
            attached = []  # a copy of the whole table follows, if any
        elif joined:
            leaves.note_attached(row.id, table, joined, at=self.seen_at, at_us=self._seen_us)
        if attached and is_streaming and not left and not self._directory.definitions.is_waiting(row.id):
            attached = [] if begin_copy_of(self._catalog, row, table, attached) else attached
        if raw := self._layouts.raw_columns(table, row.id):
            self._directory.raw_past.begin(row.id, raw)
            self._directory.defaults.forget(row.id)
        if unruled := self._layouts.unruled_before(table, row.id):
            note_raw_values(self._catalog, self._stream, row.id, unruled, time.time_ns() // 1000)
            logger.warning(
                "older records keep their values", code="raw_values_kept", table=table.full_name, columns=unruled
            )
        expected = self._layouts.remember(
            table,
            row.id,
            sent,
            members,
            now=now,
            since=self._directory.shown.since,
            shown=shown,
            odd=odd,
            copied=news is not None,
            attached=attached,
        )
        return left, expected

    def _copies_partition_that_left(self, table: SourceTable, row: TableRow) -> bool:
        """Return whether the rows of a partition that is gone are being copied apart."""
        if row.state is not TableState.COPYING or not row.copy_id:
            return False
        live = {partition.oid for partition in table.partitions}
        chunks = self._catalog.chunks(row.id, row.copy_id)
        left = [c for c in chunks if "partition" in c.facts and c.facts["partition"] not in live]
        return any(chunk.state is not ChunkState.DURABLE for chunk in left)

    def _settle_truncates(self, table: SourceTable, row: TableRow) -> None:
        """Record that truncates aren't sent; once they are, request a copy, since some may have been missed."""
        why = self.coverage.without_truncates.get(table.oid)
        if why is not None and row.reason != why:
            logger.warning("truncates aren't captured", table=table.full_name, reason=why)
            details = {"cause": NO_TRUNCATES}
            self._catalog.set_state(
                row.id, TableState.STREAMING, why, details=details, only_from=[TableState.STREAMING]
            )
        elif why is None and row.details.get("cause") == NO_TRUNCATES:
            self._catalog.set_state(row.id, TableState.COPY_REQUESTED, "a publication sends its truncates now")

    def _notice_leaving(self, connection: Connection, rows: Iterable[TableRow], passed: Lsn) -> None:
        """Give up tables that were dropped or left out, once the log has all their changes."""
        rows = [*rows]
        for oid in self._leaving.keys() - {row.relation_oid for row in rows}:
            del self._leaving[oid]
        for row in rows:
            if row.relation_oid in self.facts:
                self._leaving.pop(row.relation_oid, None)
            elif row.relation_oid not in self._leaving:
                self._leaving[row.relation_oid] = insert_lsn(connection)
            elif passed >= self._leaving[row.relation_oid]:
                logger.info("table gone", table=qualified_name(row.namespace, row.name))
                reason = "it was dropped at the source, or the configuration leaves it out"
                # The state comes last: if this is interrupted, the next look deletes what is left.
                self._layouts.forget(row.id)
                self._directory.leaves.known.forget(row.id)
                self._directory.defaults.forget(row.id)
                self._catalog.drop_chunks(row.id)
                self._catalog.resume_copy(self._catalog.stream(self._config.stream).id, row.id)
                self._catalog.set_state(row.id, TableState.GONE, reason)
                del self._leaving[row.relation_oid]

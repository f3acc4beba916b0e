"""The directory of captured tables, for the decoder: which relation is which table, and under which schema version.

Answers come from memory. The catalog is read when a relation comes for the first time and whenever a Relation message
differs from the one before; new tables and new schema versions are written to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import structlog

from millstream.capture import table_states
from millstream.capture.added_defaults import AddedDefaults
from millstream.capture.column_rules.binding import RULES, ColumnRules
from millstream.capture.column_rules.rows_before_rules import RawPast
from millstream.capture.config import CaptureConfig
from millstream.capture.connection import connect
from millstream.capture.leaves.detached_leaves import KnownLeaves
from millstream.capture.leaves.leaf_relations import LeafRelations
from millstream.capture.pending_definitions import PendingDefinitions
from millstream.capture.source_tables import SourceTable, possible_ancestors
from millstream.capture.transient_column_names import ShownColumns, form_of
from millstream.catalog import Catalog, TableRow, TableState
from millstream.codec.pgoutput import MESSAGES_COLUMNS, Relation, raw_schema, table_schema
from millstream.codec.pgoutput.relations import undecodable
from millstream.errors import ConfigError, UnknownTable
from millstream.failpoints import is_asked
from millstream.model.ids import SchemaVersion, ShardId, SourceId, StreamId, TableId
from millstream.model.names import TablePatterns
from millstream.model.operations import FIRST_SHARD
from millstream.model.schema import ReplicaIdentity, TableKind, TableSchema

_LOOK_PATIENCE_S: Final = 10.0
"""How long the stream waits for a look at the source's tables that explains a form of records."""

logger = structlog.get_logger("millstream.capture")


@dataclass(frozen=True, slots=True)
class _CachedSchema:
    asked: tuple[bytes, TableId | None, TableState | None, object]
    """A relation that was given up comes back as another table."""
    schema: TableSchema | None


class TableDirectory:
    """`codec.pgoutput.TableDirectory` over the catalog, for one source.

    Concurrency: the decoding thread reads; `learn` and `forget` may be called from others.
    """

    def __init__(
        self, catalog: Catalog, stream: StreamId, source: SourceId, config: CaptureConfig, rules: ColumnRules
    ) -> None:
        self._catalog = catalog
        self.rules = rules
        self.raw_past = RawPast(catalog, stream)
        self.shown = ShownColumns(catalog, stream)
        self.definitions = PendingDefinitions(catalog, stream)
        self.defaults = AddedDefaults(catalog, stream)
        self.stream = stream
        self._source = source
        self._config = config
        self._patterns = TablePatterns.parse(config.tables)
        self._left_out: set[int] = set()
        """Partitions whose table is captured or left out; one that is detached comes with the next look's facts."""
        self._lock, self._refreshing = threading.Lock(), threading.Lock()
        self._facts: dict[int, SourceTable] = {}
        self._rows: dict[int, TableRow] = {row.relation_oid: row for row in self._captured()}
        self._shards = {row.id: row.shard for row in self._rows.values()}
        """A table's shard never changes."""
        known = catalog.sources(stream)
        mine = [(row.system_identifier, row.database) for row in known if row.id == source]
        self._branches = {row.id for row in known if (row.system_identifier, row.database) in mine}
        """The sources that are this database, on any timeline."""
        self._answers: dict[int, _CachedSchema] = {}
        self._met: set[int] = set()
        self.leaves = LeafRelations(
            KnownLeaves(catalog, stream),
            config,
            lambda: (self._rows, self._facts),
            self._copy_again_now,
            self._have_look,
        )
        self._messages: TableSchema | None = None
        self._keys = {
            schema.table_id: schema
            for schema in catalog.latest_schemas(stream).values()
            # A table that is captured into history only has no key by our choice.
            if schema.kind is TableKind.TABLE and (schema.key or schema.replica_identity is ReplicaIdentity.FULL)
        }
        """By table, the schema with the key of its last record in the log."""
        self._unnumbered_scope = f"capture/{stream}/unnumbered"
        self._unnumbered: dict[str, list[str]] = catalog.facts(self._unnumbered_scope)
        """By table, the columns of records in the log whose numbers aren't known."""
        self.look_wanted = threading.Event()
        """Set if the stream shows that the last look at the source's tables is outdated."""
        self.hurry: Callable[[], None] = lambda: None
        """Wakes the thread that looks at the source's tables."""

    @property
    def source(self) -> SourceId:
        """The source whose stream is decoded."""
        return self._source

    def learn(self, facts: Mapping[int, SourceTable]) -> None:
        """Replace the facts from the source's catalogs: primary keys under FULL, and usable identities."""
        with self._lock:
            self._facts = dict(facts)

    def refresh(self) -> list[TableRow]:
        """Read the tables' present states from the catalog; return them."""
        with self._refreshing:  # else an older state could replace a newer one, and hide a copy that is asked for
            rows = self._captured()
            with self._lock:
                self._rows = {row.relation_oid: row for row in rows}
                self._shards |= {row.id: row.shard for row in rows}
        return rows

    def table_row(self, facts: SourceTable) -> TableRow:
        """Return the catalog's row of a source table, which is created if it is new.

        A row as last refreshed is returned without a call of the catalog, if it still has the table's name.
        """
        with self._lock:
            self._facts[facts.oid] = facts
            row = self._rows.get(facts.oid)
        if (
            row is not None
            and row.source in self._branches
            and (row.namespace, row.name) == (facts.namespace, facts.name)
        ):
            return row
        return self._row(facts.oid, facts.namespace, facts.name, has_identity=facts.usable)

    def schema_for(self, relation: Relation) -> TableSchema | None:
        """Return the table's schema under this relation: kind TABLE, or RAW if it is quarantined; None: not captured.

        A quarantined table with rules isn't captured: nothing of it is stored undecoded.
        """
        root = self.leaves.root_of(relation)
        with self._lock:
            row, facts = self._rows.get(relation.oid), self._facts.get(relation.oid)
            known = self._answers.get(relation.oid)
            if root is not None:
                row, facts = self._rows.get(root.relation_oid, root), self._facts.get(root.relation_oid)
        if root is None and self.leaves.is_left_out(relation.oid):
            return None
        id_, state = (None, None) if row is None else (row.id, row.state)
        seen = None if facts is None else (facts.partitioned, facts.key, root and facts.relation.columns)
        asked = (relation.encoded, id_, state, seen)
        if known is not None and known.asked == asked and not self._gets_other_numbers(known.schema):
            schema = known.schema
        else:
            as_table = relation if root is None or row is None else self._as_root(relation, row, facts)
            schema = self._resolve(as_table, row, facts, is_leaf=root is not None)
            if row is not None:
                with self._lock:
                    self._answers[relation.oid] = _CachedSchema(asked, schema)
                    self._met.add(row.relation_oid)
        if schema is not None:
            self.note_form(schema)
            if root is None and schema.partitioned:
                self.leaves.known.note_rows_without(schema.table_id)
        return schema

    def as_root(self, relation: Relation, row: TableRow) -> tuple[Relation, tuple[int, ...] | None]:
        """Return a leaf partition's relation as its table's, as `LeafRelations.as_root` does."""
        with self._lock:
            facts = self._facts.get(row.relation_oid)
        return self.leaves.as_root(relation, row, facts)

    def _as_root(self, relation: Relation, row: TableRow, facts: SourceTable | None) -> Relation:
        if row.state is TableState.QUARANTINED:
            return replace(relation, oid=row.relation_oid, namespace=row.namespace, name=row.name)
        return self.leaves.as_root(relation, row, facts)[0]

    def has_met(self, relation_oid: int) -> bool:
        """Return whether this session's stream has named a relation: records of it may be in the log.

        Records of earlier sessions show in the catalog: a schema is there before a record with it.
        """
        with self._lock:
            return relation_oid in self._met

    def _gets_other_numbers(self, schema: TableSchema | None) -> bool:
        """Whether a look has found the numbers of a schema's columns since, or others than it has.

        A column that was dropped and added again may leave the Relation message as it was.
        """
        if schema is None or schema.kind is not TableKind.TABLE:
            return False
        form = form_of(schema)
        if not schema.is_numbered:
            return bool(self.shown.numbers(schema.table_id, form))
        return self.shown.expects_others(schema.table_id, form, [column.number for column in schema.columns])

    def note_form(self, schema: TableSchema) -> None:
        """Note that records with this schema are about to enter the log. Any thread."""
        if self._config.follows_names and schema.kind is TableKind.TABLE:
            self._note_numbers(schema)
        if self.shown.note(schema):
            self.look_wanted.set()

    def _note_numbers(self, schema: TableSchema) -> None:
        """Store that records without numbers are about to enter the log, or that others show the numbers of theirs."""
        id_ = str(schema.table_id)
        if not schema.is_numbered and self._unnumbered.get(id_) != schema.column_names:
            self._unnumbered[id_] = schema.column_names
            self._catalog.put_fact(self._unnumbered_scope, id_, schema.column_names)
        elif schema.is_numbered and self._unnumbered.get(id_) == schema.column_names:
            self._forget_unnumbered(schema.table_id)

    def _forget_unnumbered(self, table: TableId) -> None:
        if self._unnumbered.pop(str(table), None) is not None:
            self._catalog.drop_fact(self._unnumbered_scope, str(table))

    def lacks_defaults(self, table: TableId) -> bool:
        """Return whether a table has defaults that readers don't find: a record in the log lacks its columns' numbers."""
        is_found = self._config.follows_names and str(table) not in self._unnumbered
        return not is_found and self.defaults.has_any(table)

    def follows_names(self, table: TableId) -> bool:
        """Return whether readers find a table's columns by their numbers: its records in the log name them."""
        if not self._config.follows_names or str(table) in self._unnumbered:
            return False
        schema = self._catalog.latest_schemas(self.stream).get(table)
        return schema is not None and schema.kind is TableKind.TABLE and schema.is_numbered

    def _copy_again_now(self, row: TableRow, facts: SourceTable | None, news: str) -> None:
        """Request another copy because of a record, and let capture see it before the record enters the log."""
        self.request_copy_again(row, facts, news)
        self.refresh()
        self.look_wanted.set()

    def _have_look(self) -> None:
        self.look_wanted.set()
        self.hurry()

    def request_copy_of(self, table: TableId, news: str) -> None:
        """Request another copy of a table, as `request_copy_again` does."""
        with self._lock:
            row = next((row for row in self._rows.values() if row.id == table), None)
            facts = None if row is None else self._facts.get(row.relation_oid)
        if row is not None:
            self._copy_again_now(row, facts, news)

    def request_copy_again(self, row: TableRow, facts: SourceTable | None, news: str) -> None:
        """Request another copy of a table, held if it is large, as `table_states.request_copy_again` does."""
        table_states.request_copy_again(self._catalog, row, facts, news, held_above=self._config.copy_again_above)

    def note_key(self, schema: TableSchema) -> None:
        """Note that from here on a table's records in the log have this key, and none before counts.

        For the decoding thread.
        """
        self._keys[schema.table_id] = schema
        self._forget_unnumbered(schema.table_id)
        self.shown.forget(schema.table_id)
        self.note_form(schema)

    def truncates_all(self, schema: TableSchema, leaves: frozenset[int]) -> bool:
        """Return whether a truncate of these leaf partitions leaves no row of their table that the log has.

        If it leaves some and rows of the log don't name their leaf, another copy is requested: an `x` can't say which are gone.
        """
        known, id_ = self.leaves.known, schema.table_id
        with self._lock:
            row, facts = self._rows.get(schema.relation_oid), self._facts.get(schema.relation_oid)
        if known.are_all(id_, leaves) and (known.is_whole(id_) or known.was_read_by_leaves(id_)):
            return True
        if not known.is_whole(id_) and row is not None:
            self._copy_again_now(row, facts, "a partition was truncated, and rows don't name their partitions")
        return False

    def messages_schema(self) -> TableSchema:
        """Return the schema of the source's logical messages."""
        if self._messages is None:
            row = self._catalog.table_for(
                self.stream, self._source, 0, "", "_messages", kind=TableKind.MESSAGES, state=TableState.STREAMING
            )
            schema = TableSchema(
                table_id=row.id,
                version=SchemaVersion(0),
                source=self._source,
                namespace="",
                name="_messages",
                columns=MESSAGES_COLUMNS,
                kind=TableKind.MESSAGES,
            )
            self._messages = self._catalog.put_schema(self.stream, schema)
        return self._messages

    def quarantine(self, relation_oid: int, reason: str) -> TableRow | None:
        """Set the table of a relation aside, and return it.

        From now on its changes enter the log undecoded, those of the messages being decoded too.
        """
        row = self._row_of(relation_oid)
        if row is None:
            return None
        table_states.quarantine(self._catalog, row, reason)
        self.refresh()
        return row

    def _row_of(self, relation_oid: int) -> TableRow | None:
        """Return the captured table that a relation is, or is a leaf partition of, as last refreshed."""
        id_ = self.leaves.known.table_of(relation_oid)
        with self._lock:
            if relation_oid in self._facts or id_ is None:
                return self._rows.get(relation_oid)
            return next((row for row in self._rows.values() if row.id == id_), None)

    def refuse(self, oid: int, namespace: str, name: str, error: ConfigError | UnknownTable) -> None:
        """Quarantine a table whose rules can't be applied: none of its changes enter the log."""
        with self._lock:
            row = self._rows.get(oid)
        row = row or self._row(oid, namespace, name, has_identity=True)
        reason = f"{error.code}: {error.message}"
        if row.state is not TableState.QUARANTINED or row.reason != reason:
            details = {"cause": RULES, "code": error.code, "hint": error.hint}
            table_states.quarantine(self._catalog, row, reason, details=details)
            self.refresh()

    def is_undecoded(self, oid: int) -> bool:
        """Return whether a relation's changes aren't decoded: its table is quarantined, as last refreshed, or not certain."""
        row = self._row_of(oid)
        return self.leaves.is_left_out(oid) or (row is not None and row.state is TableState.QUARANTINED)

    def selects(self, relation: Relation) -> bool:
        """Return whether the configuration selects a relation's table, as far as the last look shows."""
        with self._lock:
            listed = relation.oid in self._facts
        selected = self._patterns.select(relation.namespace, relation.name)
        # A partition of a table that is left out matches a pattern, and no look lists it.
        return listed or (selected and not self._patterns.leave_some_out)

    def rows(self) -> list[TableRow]:
        """Return the captured tables, as last refreshed."""
        with self._lock:
            return list(self._rows.values())

    def shard_of(self, table: TableId) -> ShardId:
        """Return the shard on which a table lies."""
        return self._shards.get(table, FIRST_SHARD)

    def _captured(self) -> list[TableRow]:
        return [row for row in self._catalog.tables(self.stream) if row.is_captured]

    def _row(self, oid: int, namespace: str, name: str, *, has_identity: bool) -> TableRow:
        state, reason = table_states.copy_or_history_only(usable=has_identity)
        row = self._catalog.table_for(
            self.stream,
            self._source,
            oid,
            namespace,
            name,
            shard=self._config.shard_of(f"{namespace}.{name}"),
            state=state,
            reason=reason,
        )
        with self._lock:
            self._rows[oid] = row
            self._shards[row.id] = row.shard
        return row

    def _resolve(
        self, relation: Relation, row: TableRow | None, facts: SourceTable | None, *, is_leaf: bool
    ) -> TableSchema | None:
        identity = relation.replica_identity
        named = [c.name for c in relation.columns if c.in_identity]
        has_identity = bool(named) and identity is not ReplicaIdentity.NOTHING
        if row is None:
            if not self._is_selected(relation, facts):
                return None
            usable = facts.usable if facts is not None else has_identity
            row = self._row(relation.oid, relation.namespace, relation.name, has_identity=usable)
        elif (row.namespace, row.name) != (relation.namespace, relation.name):
            row = self._row(relation.oid, relation.namespace, relation.name, has_identity=True)
        if row.state is TableState.QUARANTINED and (
            row.details.get("cause") == RULES or self.rules.concern(row.relation_oid, row.namespace, row.name)
        ):
            return None
        if row.state is TableState.QUARANTINED:
            plain = raw_schema(relation, source=self._source, table_id=row.id, version=SchemaVersion(0))
            return self._catalog.put_schema(self.stream, plain)
        if is_asked(f"capture.decode.{row.namespace}.{row.name}"):
            raise undecodable(relation, "a failpoint asks for it")
        key = self._key(relation, facts)
        partitioned = is_leaf or (facts is not None and facts.partitioned)
        if row.state is TableState.HISTORY_ONLY:
            key = ()
        schema = table_schema(relation, source=self._source, key=key, table_id=row.id)
        schema = replace(schema, partitioned=partitioned)
        schema = self.defaults.told(schema.with_numbers(self._numbers(schema, row)))
        if row.state is not TableState.HISTORY_ONLY:
            self._settle_key(row, schema, facts)
        return self._catalog.put_schema(self.stream, schema)

    def _is_selected(self, relation: Relation, facts: SourceTable | None) -> bool:
        """Return whether a relation that isn't captured so far should be.

        A publication without `publish_via_partition_root` sends partitions under their own names, also those of a table
        that is captured or left out. If no look has listed the relation, the source is asked once what it is a partition of.
        """
        if not self._patterns.select(relation.namespace, relation.name) or relation.oid in self._left_out:
            return False
        with self._lock:
            roots = [table for table in self._facts.values() if table.partitioned]
        if facts is not None or not (roots or self._patterns.leave_some_out):
            return True
        if not any(part.oid == relation.oid for root in roots for part in root.partitions):
            with connect(self._config.dsn, purpose="partitions") as connection:
                ancestors, certain = possible_ancestors(connection, relation.oid)
            part_of_captured = certain and any(self._patterns.select(*root) for root in ancestors)
            selected = self._patterns.select_partition(relation.namespace, relation.name, ancestors)
            if selected and not part_of_captured:
                return True
            if not certain:
                logger.warning(
                    "a dropped table is left out: it may have been a partition of one that `tables` leaves out",
                    table=relation.qualified_name,
                )
        self._left_out.add(relation.oid)
        return False

    def _numbers(self, schema: TableSchema, row: TableRow) -> tuple[int, ...]:
        """Return the columns' numbers in the source, which the stream doesn't send; nothing if they aren't known."""
        form = form_of(schema)
        numbers = self.shown.numbers(row.id, form)
        if numbers or not self._config.follows_names:
            return numbers
        return self.shown.found_numbers(row.id, form, look=self._have_look, patience_s=_LOOK_PATIENCE_S)

    def _settle_key(self, row: TableRow, schema: TableSchema, facts: SourceTable | None) -> None:
        """Request another copy of a table whose records have another key from here on.

        Deletes and moves under the old key can't be matched by the new one. This comes before the first record under
        the new key is in the log, so no fold mixes the two.
        """
        before = self._keys.get(row.id, schema)
        if not before.has_key_of(schema):
            news = f"its key was {_spoken(before.key)} and is {_spoken(schema.key)}"
            self._copy_again_now(row, facts, news)
        self._keys[row.id] = schema

    @staticmethod
    def _key(relation: Relation, facts: SourceTable | None) -> tuple[str, ...] | None:
        """Return the primary key under FULL if all its columns are sent; else None (the identity's columns)."""
        if relation.replica_identity is not ReplicaIdentity.FULL or facts is None:
            return None
        names = {c.name for c in relation.columns}
        primary = tuple(c.name for c in facts.key)
        return primary if set(primary) <= names else ()


def _spoken(key: tuple[str, ...]) -> str:
    return f"({', '.join(key)})" if key else "none"

"""From rules and rows to places: the shard and partition of the log for each row, and its sinks.

Works on whole columns; order within each place is the rows' own. It is a pure function of the rules, the ring in
force and the rows, except for the counts of rows by target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.errors import IngestError, RoutingError
from millstream.model.ids import SchemaVersion, ShardId, TableId
from millstream.model.operations import TableRows, WriteOps
from millstream.model.schema import TableSchema
from millstream.routing.hashing import is_hashable, key_hashes
from millstream.routing.partitions import PartitionTemplate
from millstream.routing.rules import (
    DEVNULL,
    HashRing,
    RoutingConfig,
    RoutingRules,
    RuleTarget,
    ShardConfig,
    SpecificTarget,
)
from millstream.routing.shard_map import ShardMap

ENTRIES_MAX: Final = 4096
"""Most entries of one call, shards times partitions: each is an entry of the log's directory."""
_NOWHERE: Final = -1
_BY_RING: Final = -2
_TABLES_KNOWN_MAX: Final = 10_000
_CODES_COUNTED_MAX: Final = 1 << 16

Places: TypeAlias = npt.NDArray[np.int64]
"""The shard of each row; -1: none."""


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """The destinations of rows."""

    shards: ShardId | Places
    """One shard for all rows; or one for each row."""
    sinks: Mapping[str, npt.NDArray[np.int64] | None]
    """By name of the sink, the numbers of its rows; None: all."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A rule that takes rows, or might."""

    number: int | None
    """Its place among the rules, from 1; None: the default after the rules."""
    why: str
    target: RuleTarget
    where: str | None = None


@dataclass(frozen=True, slots=True)
class _TableRules:
    """The rules for one version of a table."""

    specific: tuple[tuple[SpecificTarget, RuleTarget], ...]
    rest: RuleTarget | None
    ring: tuple[str, ...]
    template: PartitionTemplate | None


class Router:
    """The places of a stream's rows, under rules and one ring.

    Args:
        rules: the configured rules; None: there are none, and each table lies on its shard.
        shard_of_table: returns the configured shard of a table, by `schema.table`; None if it has none. It applies
            after the rules and before the ring.
        partitions: templates, by `schema.table`.
        ring: the ring in force, if the rules have one.
        era: the number of its era, which entries have.

    Concurrency: any number of threads.
    """

    def __init__(
        self,
        rules: RoutingRules | None,
        *,
        shard_of_table: Callable[[str], ShardId | None],
        partitions: Mapping[str, PartitionTemplate] | None = None,
        ring: ShardMap | None = None,
        era: int = 0,
        count: Callable[[str, int], None] | None = None,
    ) -> None:
        self.rules = rules
        self.era = era
        self.ring = ring
        self._count = count
        self._shard_of_table = shard_of_table
        self._partitions = dict(partitions or {})
        self._known: dict[tuple[TableId, SchemaVersion, str], _TableRules] = {}

    def with_ring(self, ring: ShardMap, *, era: int) -> Router:
        """Return a router with the same rules and another ring."""
        return Router(
            self.rules,
            shard_of_table=self._shard_of_table,
            partitions=self._partitions,
            ring=ring,
            era=era,
            count=self._count,
        )

    def place(self, schema: TableSchema, rows: pa.RecordBatch) -> tuple[TableRows, ...]:
        """Return the rows' entries: for the log by shard and partition, then for sinks (`TableRows.sink`).

        Raises:
            RoutingError (`no_route_matches`): no rule takes some of the rows.
            RoutingError (`invalid_route`): the rules can't be followed for this table.
            IngestError (`table_captured`): its rows come from PostgreSQL: they lie whole on one shard.
        """
        plan = self.plan(schema, rows)
        entries = list(self._entries(schema, rows, plan.shards))
        for sink, at in plan.sinks.items():
            own = rows if at is None else _taken(rows, at)
            if self._count is not None:
                self._count(sink, own.num_rows)
            if sink != DEVNULL and own.num_rows:
                entries.append(TableRows(schema, own, sink=sink))
        return tuple(entries)

    def check(self, schema: TableSchema, rows: pa.RecordBatch) -> tuple[TableRows, ...]:
        """Place as `place`, for a table or columns that don't exist so far. Nothing is counted or remembered."""
        like = Router(self.rules, shard_of_table=self._shard_of_table, partitions=self._partitions, ring=self.ring)
        return like.place(schema, rows)

    def place_anew(self, ops: WriteOps) -> WriteOps:
        """Return operations that were placed under another ring, placed under this one; given partitions stay."""
        of_table: dict[tuple[TableId, SchemaVersion], list[TableRows]] = {}
        for entry in ops.tables:
            of_table.setdefault((entry.schema.table_id, entry.schema.version), []).append(entry)
        placed: list[TableRows] = []
        for entries in of_table.values():
            schema = entries[0].schema
            if self._rules_of(schema).template is not None:
                placed += self._placed_anew(schema, entries, None)
                continue
            names = dict.fromkeys(entry.partition for entry in entries)
            apart = [(name, [entry for entry in entries if entry.partition == name]) for name in names]
            found = [entry for name, own in apart for entry in self._placed_anew(schema, own, name)]
            placed += found if len(names) == 1 else in_key_order(found)
        return replace(ops, tables=tuple(placed))

    def _placed_anew(self, schema: TableSchema, entries: Sequence[TableRows], partition: str | None) -> list[TableRows]:
        """Return entries of one table, placed again; in the given partition, if there is one."""
        rows = pa.concat_batches([entry.rows for entry in entries])
        numbers = [rows.column(name).to_numpy() for name in ("__index", "__operation")]
        whole = rows.take(pa.array(np.lexsort(numbers)))
        found = self._entries(schema, whole, self.plan(schema, whole).shards)
        return found if partition is None else [replace(entry, partition=partition) for entry in found]

    # --- places --------------------------------------------------------------------------------------------------

    def plan(self, schema: TableSchema, rows: pa.RecordBatch) -> RoutePlan:
        """Return the destinations of rows; raises as `place`. Nothing is counted."""
        of_table = self._rules_of(schema)
        left: npt.NDArray[np.bool_] | None = None
        """Rows that no rule has taken; None: all of them."""
        taken: list[tuple[RuleTarget, npt.NDArray[np.bool_] | None]] = []
        for rule, target in of_table.specific:
            if rule.matcher.where is None:
                taken.append((target, left))
                left = np.zeros(rows.num_rows, dtype=np.bool_)
                break
            found = rule.matcher.where.matches(rows).to_numpy(zero_copy_only=False)
            mine = found if left is None else found & left
            if mine.any():
                taken.append((target, mine))
                left = ~mine if left is None else left & ~mine
        if left is None or left.any():
            if of_table.rest is None:
                raise self._no_route(schema, rows, left)
            taken.append((of_table.rest, left))
        return self._plan(rows, of_table, taken)

    def _plan(
        self,
        rows: pa.RecordBatch,
        of_table: _TableRules,
        taken: Sequence[tuple[RuleTarget, npt.NDArray[np.bool_] | None]],
    ) -> RoutePlan:
        sinks: dict[str, npt.NDArray[np.int64] | None] = {}
        codes: Places | None = None
        one: int = _NOWHERE
        for target, mask in taken:
            code = _BY_RING if target.ring else _NOWHERE if target.shard is None else int(target.shard)
            if mask is None:
                one = code
            else:
                codes = np.full(rows.num_rows, _NOWHERE, dtype=np.int64) if codes is None else codes
                codes[mask] = code
            for sink in target.sinks:
                before = sinks.get(sink, np.empty(0, dtype=np.int64))
                own = None if mask is None else np.flatnonzero(mask)
                sinks[sink] = None if own is None or before is None else np.sort(np.concatenate((before, own)))
        if codes is None and one != _BY_RING:
            if one == _NOWHERE:
                return RoutePlan(np.full(rows.num_rows, _NOWHERE, dtype=np.int64), sinks)
            return RoutePlan(ShardId(one), sinks)
        if codes is None or (codes == _BY_RING).any():
            assert self.ring is not None
            by_ring = self.ring.shards_of_keys([rows.column(name) for name in of_table.ring])
            codes = by_ring if codes is None else np.where(codes == _BY_RING, by_ring, codes)
        return RoutePlan(codes, sinks)

    def _no_route(self, schema: TableSchema, rows: pa.RecordBatch, left: npt.NDArray[np.bool_] | None) -> RoutingError:
        count = rows.num_rows if left is None else int(left.sum())
        first = 0 if left is None else int(left.argmax())
        ring = isinstance(self.rules, ShardConfig) and self.rules.hash_ring is not None
        why = ", and the table has no key for the hash ring" if ring else ""
        return RoutingError(
            f"no rule takes {count} of {rows.num_rows} rows of {schema.full_name}, the first of them row {first}{why}",
            code="no_route_matches",
            hint=f'Name columns for the ring: [streams.S.routing.hash_ring.columns_of] "{_name(schema)}" = ["…"].'
            if ring
            else None,
            table=schema.full_name,
            row=first,
            rows=count,
        )

    # --- rules of a table ----------------------------------------------------------------------------------------

    def explain(self, schema: TableSchema, row: pa.RecordBatch | None = None) -> list[Chosen]:
        """Return the rules that take a row of a table; without a row every rule that may, in order. Raises as `place`."""
        of_table = self._rules_of(schema)
        found: list[Chosen] = []
        numbers = {id(rule): n for n, rule in enumerate(_specific(self.rules), 1)}
        for rule, target in of_table.specific:
            where = rule.matcher.where
            if row is not None and where is not None and not where.matches(row)[0].as_py():
                continue
            found.append(Chosen(numbers[id(rule)], str(rule.matcher), target, None if where is None else where.text))
            if where is None or row is not None:
                return found
        if of_table.rest is None:
            if row is not None:
                raise self._no_route(schema, row, None)
            return found
        if of_table.rest.ring:
            columns = ", ".join(of_table.ring)
            why = f"no rule takes it: the hash ring over {columns}"
        elif isinstance(self.rules, RoutingConfig):
            why = "all rows of the stream go there"
        else:
            why = "no rule takes it: the table's shard"
        found.append(Chosen(None, why, of_table.rest))
        return found

    def _rules_of(self, schema: TableSchema) -> _TableRules:
        key = (schema.table_id, schema.version, schema.name)
        known = self._known.get(key)
        if known is None:
            known = self._find_rules(schema)
            if len(self._known) >= _TABLES_KNOWN_MAX:
                self._known.clear()
            self._known[key] = known
        return known

    def _find_rules(self, schema: TableSchema) -> _TableRules:
        name = _name(schema)
        if schema.source != 0:
            raise IngestError(
                f"{schema.full_name} is captured: it lies whole on one shard, and no rule moves it",
                code="table_captured",
                table=schema.full_name,
            )
        specific = [rule for rule in _specific(self.rules) if rule.matcher.is_for(name)]
        for at, rule in enumerate(specific):
            if rule.matcher.where is None:
                specific = specific[: at + 1]
                break
        rest, columns = self._rest(schema, name)
        of_ring = any(rule.to.ring for rule in specific) or (rest is not None and rest.ring)
        if of_ring:
            _check_ring(schema, columns, has_ring=self.ring is not None)
        ends = not specific or specific[-1].matcher.where is not None
        _check_keys_stay(schema, specific, rest if ends else None)
        return _TableRules(tuple((rule, rule.to) for rule in specific), rest, columns, self._partitions.get(name))

    def _rest(self, schema: TableSchema, name: str) -> tuple[RuleTarget | None, tuple[str, ...]]:
        """Return the target of rows that no rule takes, and the columns by which a ring spreads them."""
        ring: HashRing | None = self.rules.hash_ring if isinstance(self.rules, ShardConfig) else None
        columns = () if ring is None else ring.columns_for(name, schema.key)
        if isinstance(self.rules, RoutingConfig):
            return self.rules.to, columns
        own = self._shard_of_table(name)
        if own is not None:
            return RuleTarget(own), columns
        return (RuleTarget(ring=True) if columns else None), columns

    # --- entries -------------------------------------------------------------------------------------------------

    def _entries(self, schema: TableSchema, rows: pa.RecordBatch, shards: ShardId | Places) -> list[TableRows]:
        """Yield the log's entries by shard and partition, and by stretches if a key changes its partition."""
        if not isinstance(shards, int) and (shards == _NOWHERE).any():
            kept = np.flatnonzero(shards != _NOWHERE)
            shards, rows = shards[kept], _numbered_anew(_taken(rows, kept), rows)
        if not rows.num_rows:
            return []
        numbers, codes = (
            ([int(shards)], np.zeros(rows.num_rows, dtype=np.int64)) if isinstance(shards, int) else _coded(shards)
        )
        template = self._rules_of(schema).template
        names: Sequence[str | None] = [None]
        if template is not None:
            names, of_partition = template.partitions(schema, rows)
            codes = codes * len(names) + of_partition
            if len(names) > 1 and schema.key:
                codes = _in_stretches(schema, rows, codes, len(numbers) * len(names))
        count = len(numbers) * len(names)
        if count == 1:
            return [TableRows(schema, rows, ShardId(numbers[0]), names[0], self.era)]
        found = []
        for code, at in _groups(schema, codes):
            shard, name = numbers[code % count // len(names)], names[code % len(names)]
            own = rows if len(at) == rows.num_rows else _taken(rows, at)
            found.append(TableRows(schema, own, ShardId(shard), name, self.era))
        return found


def _name(schema: TableSchema) -> str:
    return f"{schema.namespace}.{schema.name}"


def _specific(rules: RoutingRules | None) -> tuple[SpecificTarget, ...]:
    return rules.specific_targets if isinstance(rules, ShardConfig) else ()


def _check_ring(schema: TableSchema, columns: Sequence[str], *, has_ring: bool) -> None:
    """Raise `invalid_route` if a ring can't spread a table's rows."""
    if not has_ring or not columns:
        raise RoutingError(
            f"a rule has rows of {schema.full_name} go to the hash ring, "
            + ("which has no columns to spread them by" if has_ring else "and there is none"),
            code="invalid_route",
            hint="Give the table a key ([streams.S.keys]), or name columns in [streams.S.routing.hash_ring].",
            table=schema.full_name,
        )
    types = {column.name: column.arrow for column in schema.columns}
    for name in columns:
        if name not in types:
            raise RoutingError(
                f"{schema.full_name} has no column {name}, by which the hash ring spreads its rows",
                code="invalid_route",
                hint="Append rows that have it, or name others: [streams.S.routing.hash_ring] columns.",
                table=schema.full_name,
                column=name,
            )
        if not is_hashable(types[name]):
            raise RoutingError(
                f"column {name} of {schema.full_name} is {types[name]}: the hash ring can't spread rows by it",
                code="invalid_route",
                table=schema.full_name,
                column=name,
            )
    strangers = [name for name in columns if schema.key and name not in schema.key]
    if strangers:
        raise RoutingError(
            f"the hash ring spreads rows of {schema.full_name} by {', '.join(strangers)}, not of its key ({', '.join(schema.key)}): "
            "rows of one key would lie on several shards",
            code="invalid_route",
            hint="Name only columns of the key, or none to use the whole key.",
            table=schema.full_name,
            columns=strangers,
        )


def _check_keys_stay(schema: TableSchema, specific: Sequence[SpecificTarget], rest: RuleTarget | None) -> None:
    """Raise `invalid_route` if predicates over columns outside the key could put one key's rows on several shards."""
    if not schema.key:
        return
    locals_of = [(rule.to, rule.matcher.where) for rule in specific]
    if rest is not None:
        locals_of.append((rest, None))
    places = {(target.ring, target.shard) for target, _ in locals_of if target.is_local}
    for target, where in locals_of:
        if where is not None and len(places) > 1:
            strangers = [name for name in where.columns if name not in schema.key]
            if strangers and target.is_local:
                raise RoutingError(
                    f"rows of {schema.full_name} would go to {target} where {where.text}, which isn't of its key "
                    f"({', '.join(schema.key)}) alone: rows of one key would lie on several shards",
                    code="invalid_route",
                    hint="Choose shards by the table or by its key; rules to sinks alone may look at any column.",
                    table=schema.full_name,
                    columns=strangers,
                )


def _coded(shards: Places) -> tuple[list[int], Places]:
    """Return the shards that occur, in order, and for each row the index of its own."""
    counts = np.bincount(shards)
    numbers = np.flatnonzero(counts)
    if len(numbers) == 1:
        return numbers.tolist(), np.zeros(len(shards), dtype=np.int64)
    rank = np.zeros(len(counts), dtype=np.int64)
    rank[numbers] = np.arange(len(numbers))
    return numbers.tolist(), rank[shards]


def _in_stretches(schema: TableSchema, rows: pa.RecordBatch, codes: Places, count: int) -> Places:
    """Return codes that keep a key's rows in order.

    Entries are numbered one after the other, so a key that changes its partition begins new ones.
    """
    from millstream.routing._splitting import stretches

    hashes = key_hashes([rows.column(name) for name in schema.key])
    found: Places = stretches(hashes, codes, rows.column("__operation").to_numpy())
    return codes + found * count if found.any() else codes


def in_key_order(tables: Sequence[TableRows]) -> list[TableRows]:
    """Return entries that were placed before, and may have been merged, so that numbers keep each key's order again.

    Args:
        tables: one entry for each table, version, shard and partition, in `append_row_schema`.
    """
    alike: dict[tuple[TableId, SchemaVersion, ShardId], list[TableRows]] = {}
    for table in tables:
        alike.setdefault((table.schema.table_id, table.schema.version, table.shard), []).append(table)
    found: list[TableRows] = []
    for entries in alike.values():
        schema = entries[0].schema
        if len(entries) == 1 or not schema.key:
            found += entries
            continue
        rows = pa.concat_batches([entry.rows for entry in entries])
        order = np.lexsort([rows.column(name).to_numpy() for name in ("__index", "__operation")])
        codes = np.repeat(np.arange(len(entries)), [entry.rows.num_rows for entry in entries])[order]
        whole = _taken(rows, order)
        for code, at in _groups(schema, _in_stretches(schema, whole, codes, len(entries)), entries_max=None):
            found.append(replace(entries[code % len(entries)], rows=_taken(whole, at)))
    return found


def _groups(schema: TableSchema, codes: Places, *, entries_max: int | None = ENTRIES_MAX) -> list[tuple[int, Places]]:
    """Return the rows of each code, in order of the codes."""
    from millstream.routing._splitting import rows_by_group

    if int(codes.max()) < _CODES_COUNTED_MAX:
        used = np.flatnonzero(np.bincount(codes))
        rank = np.zeros(int(used[-1]) + 1, dtype=np.int64)
        rank[used] = np.arange(len(used))
        dense = rank[codes]
    else:
        used, dense = np.unique(codes, return_inverse=True)
    if entries_max is not None and len(used) > entries_max:
        raise RoutingError(
            f"rows of {schema.full_name} would lie in {len(used)} places of shard and partition by one call, of at most {entries_max}",
            code="invalid_route",
            hint="Append them in several calls: each key's rows with few changes of the partition.",
            table=schema.full_name,
        )
    if len(used) == 1:
        return [(int(used[0]), np.arange(len(codes), dtype=np.int64))]
    rows, starts = rows_by_group(dense, len(used))
    return [(int(code), rows[starts[n] : starts[n + 1]]) for n, code in enumerate(used)]


def _taken(rows: pa.RecordBatch, at: Places) -> pa.RecordBatch:
    """Return some rows, in that order.

    Columns of nulls only, as most added columns are, are created new: taking lists is slow.
    """
    places = pa.array(at)
    columns = [
        pa.nulls(len(at), column.type) if column.null_count == rows.num_rows else column.take(places)
        for column in rows.columns
    ]
    return pa.RecordBatch.from_arrays(columns, schema=rows.schema)


def _numbered_anew(rows: pa.RecordBatch, before: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows, of which others went elsewhere, with indexes one after the other in each operation.

    An operation's indexes begin as in `before`, which has all rows: its rows of other tables may precede them.
    """
    operation, all_operations = rows.column("__operation").to_numpy(), before.column("__operation").to_numpy()
    first = np.flatnonzero(np.diff(operation, prepend=-1))
    counts = np.diff(first, append=len(operation))
    begin = before.column("__index").to_numpy()[np.searchsorted(all_operations, operation[first])]
    index = np.arange(len(operation), dtype=np.int64) + np.repeat(begin - first, counts)
    at = rows.schema.get_field_index("__index")
    return rows.set_column(at, rows.schema.field(at), pa.array(index))

"""The keys that operations touch in tables being copied, read off the rows on their way to the log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millstream.model.exact_values import storage_values, text_renderer
from millstream.model.ids import TableId
from millstream.model.operations import SpilledOp, TableRows, WriteOps
from millstream.model.records import Op
from millstream.protocol.copy_conflicts import Key, Touch


def touches_of(ops: WriteOps, tables: Collection[TableId]) -> Iterator[tuple[TableId, Touch, frozenset[Key]]]:
    """Yield each touch of the tables by a transaction, with the table and the keys whose rows moved there incomplete.

    These come from a change of key that left a TOAST value unsent: the row's older version may never come by its own
    key.
    """
    xids: list[int | None] = []
    for table in ops.tables:
        if table.schema.table_id not in tables or table.rows.num_rows == 0:
            continue
        xids = xids or ops.operations.column("xid").to_pylist()
        for operation, keys, incomplete, moved, everything in _by_operation(table):
            xid = xids[operation]
            assert xid is not None, "changes of a table are a transaction's"
            touch = Touch(xid, frozenset(keys), frozenset(incomplete), everything)
            yield table.schema.table_id, touch, frozenset(moved)


def touches_of_spilled(op: SpilledOp, tables: Collection[TableId]) -> Iterator[tuple[TableId, Touch, frozenset[Key]]]:
    """Yield the touches of an operation that is too large for memory: it touches each of its tables as a whole."""
    touched = {table for (_, table), count in op.counts.items() if count and table in tables}
    if not touched:
        return
    moved: dict[TableId, set[Key]] = defaultdict(set)
    for piece in op.chunks():
        for table in piece:
            if table.schema.table_id in touched:
                there = pc.and_(table.rows.column("__unchanged").is_valid(), table.rows.column("__before").is_valid())
                few = TableRows(table.schema, table.rows.filter(there), table.shard)
                for *_, arrived, _ in _by_operation(few):
                    moved[table.schema.table_id] |= arrived
    xid = op.operation.column("xid").to_pylist()[0]
    for table_id in touched:
        yield table_id, Touch(xid, frozenset(), everything=True), frozenset(moved[table_id])


def _by_operation(table: TableRows) -> Iterator[tuple[int, set[Key], set[Key], set[Key], bool]]:
    """Yield (operation, keys, incomplete keys, keys moved to while incomplete, truncated) of each operation."""
    rows, key = table.rows, table.schema.key
    operations: list[int] = rows.column("__operation").to_pylist()
    ops: list[int] = rows.column("__op").to_pylist()
    keys: list[Key] = list(zip(*(column_texts(rows, name) for name in key), strict=True)) if key else [()] * len(ops)
    unchanged = rows.column("__unchanged").is_valid().to_pylist()
    before: list[Any] = rows.column("__before").to_pylist()
    found: dict[int, tuple[set[Key], set[Key], set[Key]]] = {}
    truncated: set[int] = set()
    for number, operation in enumerate(operations):
        touched, incomplete, moved = found.setdefault(operation, (set(), set(), set()))
        if ops[number] in {Op.TRUNCATE, Op.PARTITION_LEFT} or not key:
            truncated.add(operation)
            continue
        mine = keys[number]
        touched.add(mine)
        old = mine
        if before[number] is not None:
            values = dict(before[number])
            old = tuple(values.get(name, text) for name, text in zip(key, mine, strict=True))
            touched.add(old)
        if unchanged[number]:
            incomplete.add(mine)
            if old != mine:
                moved.add(mine)
    for operation, (touched, incomplete, moved) in found.items():
        yield operation, touched, incomplete, moved, operation in truncated


def column_texts(rows: pa.RecordBatch, name: str) -> list[str]:
    """Return PostgreSQL's texts of a key column; a value that its column can't hold is taken from `__exact`."""
    column = rows.column(name)
    if pa.types.is_string(column.type):
        texts: list[Any] = column.to_pylist()
    elif pa.types.is_integer(column.type):
        texts = column.cast(pa.string()).to_pylist()
    else:
        render = text_renderer(column.type)
        texts = [None if value is None else render(value) for value in storage_values(column)]
    if column.null_count:
        exact: list[Any] = rows.column("__exact").to_pylist()
        for number, text in enumerate(texts):
            if text is None:
                texts[number] = dict(exact[number] or ()).get(name, "")
    return texts

"""Small appends: the few rows of one request as values, and the columns that many such requests make together.

A batch costs by its columns, not by its rows: a batch of one row takes twenty microseconds and
twenty kilobytes to make, and six microseconds more to join to another. So a small request passes
its values as they are, and the log's writer makes columns of all waiting requests once a commit
group. From some hundred rows on, a request is cheaper with columns of its own (`WriteOps`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from sys import getsizeof
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from millstream.errors import InvalidValue
from millstream.model.ids import SchemaVersion, ShardId, SourceId, TableId
from millstream.model.operations import FIRST_SHARD, OPERATION_SCHEMA, OperationKind, SpilledOp, TableRows, WriteOps
from millstream.model.positions import Lsn
from millstream.model.records import LOG_ROW_PREFIX, Op, append_row_schema
from millstream.model.schema import TableSchema

_NOWHERE: Final[Mapping[SourceId, Lsn]] = MappingProxyType({})
_NO_SOURCE: Final = SourceId(0)
_NOT_A_VALUE: Final = (pa.ArrowException, TypeError, ValueError, OverflowError)
_SAID: Final = ("commit_ts", "trace_id")
"""The columns of `OPERATION_SCHEMA` that the last fields of an `AppendOp` fill, in their order."""
_CONTAINERS: Final = frozenset({list, tuple, dict})
_COUNT_KEPT_MAX: Final = 1024
_COUNTS_KEPT: Final = 64
"""Number of row counts kept. Groups are of a few sizes; the largest entry takes a hundred kilobytes."""
_Made = TypeVar("_Made")


class AppendOp(NamedTuple):
    """One operation of kind `APPEND`: a request's few new rows of one table.

    The caller has the table's schema and shard. The operation has no `WriteId`. Writes that need
    one come as `WriteOps` with `keys`, as applications' requests do (`ingest.appender`).

    It is a tuple because one is made for every request. The values aren't checked before the log
    takes them. Then a value that isn't of its column's type is rejected with `InvalidValue`,
    without delaying other operations.
    """

    schema: TableSchema
    rows: Sequence[Sequence[object]]
    """At least one row; each has a value for each of the schema's columns, as `pyarrow.array` takes it
    for the column's type."""
    shard: ShardId = FIRST_SHARD
    partition: str | None = None
    """The partition of the table that all rows belong to; None if the table has none."""
    commit_ts_us: int | None = None
    """The request's time, in microseconds since 1970 (UTC)."""
    trace_id: str | None = None

    @property
    def size_bytes(self) -> int:
        """Memory in bytes that the values hold."""
        size = 0
        for row in self.rows:
            size += _held(row)
        return size

    @property
    def row_count(self) -> int:
        """Number of records."""
        return len(self.rows)

    @property
    def reached(self) -> Mapping[SourceId, Lsn]:
        """No source: a request isn't captured."""
        return _NOWHERE


Submitted: TypeAlias = WriteOps | AppendOp | SpilledOp
"""The forms of operations that the log's writer takes."""


def _held(values: Iterable[Any]) -> int:
    """Return the bytes of a container and everything in it."""
    size = getsizeof(values)
    for value in values:
        if type(value) not in _CONTAINERS:
            size += getsizeof(value)
        elif isinstance(value, dict):
            size += getsizeof(value) + _held(list(chain.from_iterable(value.items())))
        else:
            size += _held(value)
    return size


def columns_of(ops: Sequence[AppendOp]) -> WriteOps:
    """Return the operations as columns, in their order.

    Args:
        ops: at least one.

    Raises:
        InvalidValue: a value isn't of its column's type, or a row has more or fewer values than its table columns;
            details: table, and the column if one is at fault.
    """
    schemas, rows, shards, partitions, *said = zip(*ops, strict=True)
    if not all(rows):
        raise InvalidValue("an append needs at least one row")
    tables: tuple[TableRows, ...]
    if all(_all_same(fact) for fact in (schemas, shards, partitions)):
        tables = (_rows_of(schemas[0], range(len(ops)), rows, shards[0], partitions[0]),)
    else:
        tables = tuple(
            _rows_of(schemas[places[0]], places, [rows[place] for place in places], shard, partition)
            for (_, shard, partition), places in _apart(schemas, shards, partitions).items()
        )
    return WriteOps(_operations(said), tables, _NOWHERE)


def _all_same(facts: Sequence[object]) -> bool:
    return facts.count(facts[0]) == len(facts)


def _apart(
    schemas: Sequence[TableSchema], shards: Sequence[ShardId], partitions: Sequence[str | None]
) -> dict[tuple[tuple[TableId, SchemaVersion], ShardId, str | None], list[int]]:
    """Group the operations' indexes by table, schema version, shard and partition."""
    found: dict[tuple[tuple[TableId, SchemaVersion], ShardId, str | None], list[int]] = {}
    for place, (schema, shard, partition) in enumerate(zip(schemas, shards, partitions, strict=True)):
        found.setdefault(((schema.table_id, schema.version), shard, partition), []).append(place)
    return found


def _operations(said: Sequence[Sequence[object]]) -> pa.RecordBatch:
    """Return a row of `OPERATION_SCHEMA` for each operation, from the last fields of its `AppendOp`."""
    count = len(said[0])
    operations = _silent_operations(count)
    for name, values in zip(_SAID, said, strict=True):
        if values.count(None) == count:
            continue
        place = OPERATION_SCHEMA.get_field_index(name)
        field = OPERATION_SCHEMA.field(place)
        try:
            operations = operations.set_column(place, field, pa.array(values, field.type))
        except _NOT_A_VALUE as error:
            raise InvalidValue(
                f"an append's {name} can't be one: {error}", column=name, type=str(field.type)
            ) from error
    return operations


def _rows_of(
    schema: TableSchema,
    places: Sequence[int],
    of_ops: Sequence[Sequence[Sequence[object]]],
    shard: ShardId,
    partition: str | None,
) -> TableRows:
    """Return the rows of one table, schema version, shard and partition, with each row's operation index."""
    arrow = append_row_schema(schema)
    rows = list(chain.from_iterable(of_ops))
    try:
        values = list(zip(*rows, strict=True))
    except (ValueError, TypeError) as error:
        raise _unlike(schema) from error
    if len(values) != len(schema.columns):
        raise _unlike(schema)
    total = len(rows)
    columns = list(_prefix(total))
    if total > len(of_ops) or len(places) != places[-1] + 1:
        counts = np.array([len(of_op) for of_op in of_ops], dtype=np.int64)
        columns[0] = pa.array(np.repeat(np.array(places, dtype=np.int32), counts))
        columns[1] = pa.array(np.arange(total, dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts))
    for column, of_column in zip(schema.columns, values, strict=True):
        try:
            columns.append(pa.array(of_column, column.arrow))
        except _NOT_A_VALUE as error:
            raise InvalidValue(
                f"a value of {schema.full_name}, column {column.name} ({column.arrow}), isn't of its type: {error}",
                table=schema.full_name,
                column=column.name,
                type=str(column.arrow),
            ) from error
    return TableRows(schema, pa.RecordBatch.from_arrays(columns, schema=arrow), shard, partition)


def _unlike(schema: TableSchema) -> InvalidValue:
    return InvalidValue(
        f"a row of {schema.full_name} must have {len(schema.columns)} values, one for each column",
        table=schema.full_name,
    )


def _remembered(made: Callable[[int], _Made]) -> Callable[[int], _Made]:
    """Cache a result that depends only on the row count, for small counts, which recur often."""
    kept = lru_cache(maxsize=_COUNTS_KEPT)(made)
    return lambda count: kept(count) if count <= _COUNT_KEPT_MAX else made(count)


@_remembered
def _silent_operations(count: int) -> pa.RecordBatch:
    """Return rows of `OPERATION_SCHEMA` with nothing set but their kind and source."""
    facts = {
        "kind": pa.array(np.full(count, int(OperationKind.APPEND), dtype=np.uint8)),
        "source": pa.array(np.full(count, int(_NO_SOURCE), dtype=np.int32)),
    }
    columns = [facts[f.name] if f.name in facts else pa.nulls(count, f.type) for f in OPERATION_SCHEMA]
    return pa.RecordBatch.from_arrays(columns, schema=OPERATION_SCHEMA)


@_remembered
def _prefix(count: int) -> tuple[pa.Array, ...]:
    """Return the columns of `append_row_schema` before a table's own, if every operation has one row."""
    sparse = [pa.nulls(count, field.type) for field in LOG_ROW_PREFIX[3:]]
    return (
        pa.array(np.arange(count, dtype=np.int32)),
        pa.array(np.zeros(count, dtype=np.int64)),
        pa.array(np.full(count, int(Op.CREATE), dtype=np.uint8)),
        *sparse,
    )

"""Messages of a consumer of kind `latest`: each has the state of one key after a record.

A record gives `u` if its row is there afterwards, and `d` if it isn't, or no longer matches `where`. A change of a key
gives two: `d` of the old key, and the new key's. A message that replaces an undelivered one takes the values that its
record left unchanged (TOAST) from there. So a `d` that stands for an update keeps that update's row, unseen.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import RoutingError
from millstream.model.exact_values import parse_texts
from millstream.model.ids import SourceId
from millstream.model.predicate import Predicate
from millstream.model.record_filter import row_schema
from millstream.model.records import Op
from millstream.model.schema import TableSchema

Bools = npt.NDArray[np.bool_]
OLD: Final = "-old"
"""The end of the id of an old key's `d`."""
APPLICATION: Final = SourceId(0)
_CREATE, _UPDATE, _DELETE = Op.CREATE.letter, Op.UPDATE.letter, Op.DELETE.letter


class KeyState(NamedTuple):
    """The state of a key after a record."""

    group: str
    facts: dict[str, Any]
    """The record as it is delivered."""
    update: dict[str, Any] | None = None
    """The update that a `d` stands for, since its new row doesn't match."""
    is_old: bool = False
    """Whether it is the old key of a change of a key."""


def states_of(facts: dict[str, Any], key: Sequence[str], groups: Sequence[str], *, is_gone: bool) -> list[KeyState]:
    """Return the states of keys after a record of their table, the old key's first.

    Args:
        facts: the record as JSON shows it; its op is `c`, `r`, `u` or `d`.
        key: the key's columns.
        groups: the record's groups; see `groups_of`.
        is_gone: whether the new row doesn't match `where`.
    """
    if facts["op"] == _DELETE:
        return [KeyState(groups[0], facts)]
    update = facts if facts["op"] == _UPDATE else {**facts, "op": _UPDATE}
    if len(groups) > 1:
        update = _moved(update)
    new = KeyState(groups[0], _key_alone(facts, key), update) if is_gone else KeyState(groups[0], update)
    if len(groups) == 1:
        return [new]
    return [KeyState(groups[1], _key_alone(facts, key, old=facts["before"]), is_old=True), new]


def _moved(facts: dict[str, Any]) -> dict[str, Any]:
    """Return an update of a key as the new key's row alone: its old values are the old key's."""
    row, before = facts["row"], facts["before"]
    known = {name: before[name] for name in facts["unchanged"] if name in before}
    unchanged = [name for name in facts["unchanged"] if name not in known]
    return {**facts, "row": row | known, "before": None, "unchanged": unchanged}


def _key_alone(facts: Mapping[str, Any], key: Sequence[str], old: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a record as the delete of its key, or of its old key."""
    row, before, known = facts["row"], facts["before"] or {}, old or {}
    values = {name: known[name] if name in known else row.get(name, before.get(name)) for name in key}
    exact = {name: text for name, text in facts["exact"].items() if name in values and name not in known}
    return {**facts, "op": _DELETE, "row": values, "before": None, "unchanged": [], "exact": exact}


def gone(predicate: Predicate, schema: TableSchema, batch: pa.RecordBatch, matches: Bools) -> Bools:
    """Return which records don't match `where` now, though their row may have matched before.

    An update is such a record, unless `before` shows that the old row didn't match either. So is an application's
    record, since it replaces the row of its key. A row that was inserted or copied is new.

    Args:
        predicate: the consumer's `where`.
        schema: the table's schema when the records were made.
        batch: records in `record_schema(schema)`.
        matches: which of them match, or may.
    """
    updates = pc.equal(batch.column("__op"), _UPDATE).to_numpy(zero_copy_only=False)
    if schema.source == APPLICATION:
        updates |= pc.equal(batch.column("__op"), _CREATE).to_numpy(zero_copy_only=False)
    found: Bools = updates & ~matches
    befores = batch.column("__before")
    if not found.any() or befores.null_count == len(befores):
        return found
    names = [column.name for column in schema.columns if column.name in predicate.columns]
    rows = [(row, dict(before)) for row, before in enumerate(befores.to_pylist()) if found[row] and before]
    rows = [(row, before) for row, before in rows if all(name in before for name in names)]
    if rows:
        shown = _old_rows(schema, names, [before for _, before in rows])
        for (row, _), may_match in zip(rows, _may_match(predicate, *shown), strict=True):
            found[row] = may_match
    return found


def _old_rows(
    schema: TableSchema, names: Sequence[str], befores: Sequence[Mapping[str, str | None]]
) -> tuple[pa.RecordBatch, set[int]]:
    """Return some columns of old rows, and the rows in which a value can't be held."""
    arrays, inexact = [], set[int]()
    for name in names:
        array, exact = parse_texts([before[name] for before in befores], schema.column(name).arrow)
        arrays.append(array)
        inexact.update(exact)
    if not names:  # each column of the condition is null
        return pa.RecordBatch.from_pylist([{}] * len(befores), schema=pa.schema([("", pa.null())])), inexact
    return pa.RecordBatch.from_arrays(arrays, schema=row_schema(map(schema.column, names))), inexact


def _may_match(predicate: Predicate, rows: pa.RecordBatch, inexact: set[int]) -> list[bool]:
    try:
        matches = predicate.matches(rows).to_pylist()
    except RoutingError:
        return [True] * rows.num_rows
    return [row in inexact or bool(found) for row, found in enumerate(matches)]


class Newest(NamedTuple):
    """The part of a message that a later one of its key may complete, as JSON."""

    record: str
    update: str | None
    """The update that a `d` stands for."""
    is_partial: bool
    """Whether the record, or that update, left columns unchanged."""


def completed(older: str, newer: Newest, others: Container[str] = ()) -> Newest:
    """Return a newer state of a key with the values of columns that it left unchanged, as far as the older one has them.

    Args:
        older: the older record, or the update that a `d` stands for, as JSON.
        newer: the newer state, which leaves columns unchanged.
        others: names that another column has in the older one.
    """
    source = msgspec.json.decode(older)
    if source["op"] != _UPDATE:
        return newer
    target = msgspec.json.decode(newer.update or newer.record)
    known = source["row"]
    filled = {name: known[name] for name in target["unchanged"] if name in known and name not in others}
    if not filled:
        return newer
    row = target["row"] | filled
    target["row"] = {name: row[name] for name in known if name in row} | row  # in the table's order
    target["exact"] |= {name: text for name, text in source["exact"].items() if name in filled}
    target["unchanged"] = [name for name in target["unchanged"] if name not in filled]
    text, is_partial = msgspec.json.encode(target).decode(), bool(target["unchanged"])
    if newer.update is None:
        return Newest(text, None, is_partial)
    return Newest(newer.record, text, is_partial)

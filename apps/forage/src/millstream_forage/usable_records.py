"""The records of the log that can be folded: other programs append to it, too, and what they appended is kept for ever.

A record that breaks a rule is left out everywhere, as if it were not there, and counted in a warning. The engine's own
records keep the rules. A column that no program has written is null in all records.
"""

from __future__ import annotations

import logging
from functools import reduce
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream_forage.tables import DIMENSIONS, ID_MAX, KINDS, SCHEMAS, TARGETS

logger = logging.getLogger("millstream_forage")

Rows = TypeVar("Rows", pa.RecordBatch, pa.Table)

_MAY_BE_NULL: Final = {
    "signals": frozenset({"duration_ms", "impression", "idempotency_key"}),
    "hides": frozenset({"kind"}),
}
_IDS: Final = frozenset({"id", "user", "item", "impression", "feed", "seed"})
_NOT_NEGATIVE: Final = frozenset({"duration_ms", "slot", "limit", "reading_time_min"})
_ONE_OF: Final = {"signals": ("kind", KINDS), "hides": ("target", TARGETS)}
_PATTERNS: Final = {"url": r"^(?i:https?)://[^\s/?#]\S*$", "token": r"\.[sm]\d{1,18}(~|$)"}
_ID_TEXT: Final = r"^(0|[1-9]\d{0,15})$"
_UNIT: Final = 1e-3
"""How far from 1 the square of a vector's length may be."""


def usable(table: str, rows: Rows) -> Rows:
    """Return the records of a table that can be folded: the table's columns in their types, and all others as they are.

    Args:
        table: name of the table; records of one that the fold doesn't know are returned as they are.
        rows: records of it, as they were read.
    """
    if table not in SCHEMAS or not rows.num_rows:
        return rows
    try:
        found = _in_types(SCHEMAS[table], rows)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:  # a column has another type
        logger.warning("%d records of %s are left out: %s", rows.num_rows, table, error)
        return rows.slice(0, 0)
    keeps = _keeping(table, found)
    if not keeps.all():
        logger.warning("%d records of %s are left out: they break its rules", np.count_nonzero(~keeps), table)
        found = found.filter(pa.array(keeps))
    return found


def _in_types(schema: pa.Schema, rows: Rows) -> Rows:
    for field in schema:
        at = rows.schema.get_field_index(field.name)
        if at < 0:
            rows = rows.append_column(field, pa.nulls(rows.num_rows, field.type))
        elif rows.schema.field(at).type != field.type:
            rows = rows.set_column(at, field, rows.column(at).cast(field.type))
    return rows


def _keeping(table: str, rows: pa.RecordBatch | pa.Table) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return for each record whether it keeps all rules."""
    rules = []
    for name in SCHEMAS[table].names:
        column = rows.column(name)
        if name not in _MAY_BE_NULL.get(table, ()):
            rules.append(pc.is_valid(column))
        if name in _IDS:
            rules.append(_or_null(pc.and_(pc.greater_equal(column, 0), pc.less_equal(column, ID_MAX))))
        if name in _NOT_NEGATIVE:
            rules.append(_or_null(pc.greater_equal(column, 0)))
        if name == "weight":
            rules.append(_or_null(pc.and_(pc.greater_equal(column, 0), pc.less_equal(column, 1))))
        if name == "propensity":
            rules.append(_or_null(pc.and_(pc.greater(column, 0), pc.less_equal(column, 1))))
        if name in _PATTERNS:
            rules.append(_or_null(pc.match_substring_regex(column, _PATTERNS[name])))
        if name == "embedding":
            rules.append(_are_unit_vectors(column))
        elif pa.types.is_list(column.type):
            rules.append(_have_no_null(column))
    if table == "hides":
        is_other = pc.not_equal(rows.column("target"), "item")
        rules.append(_or_null(pc.or_(is_other, pc.match_substring_regex(rows.column("value"), _ID_TEXT))))
    if table in _ONE_OF:
        name, values = _ONE_OF[table]
        rules.append(pc.is_in(rows.column(name), pa.array(values)))
    return np.asarray(reduce(pc.and_, rules))


def _or_null(rule: pa.Array) -> pa.Array:
    return pc.fill_null(rule, True)


def _have_no_null(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return which lists have no null in them."""
    has_none = np.ones(len(column), np.bool_)
    has_none[pc.list_parent_indices(column).filter(pc.is_null(pc.list_flatten(column))).to_numpy()] = False
    return pa.array(has_none)


def _are_unit_vectors(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return which values are vectors of the length 1."""
    keeps = np.array(pc.fill_null(pc.equal(pc.list_value_length(column), DIMENSIONS), False))
    vectors = np.asarray(pc.list_flatten(column.filter(pa.array(keeps)))).reshape(-1, DIMENSIONS)
    keeps[keeps] = np.abs(np.einsum("ij,ij->i", vectors, vectors) - 1) < _UNIT
    return pa.array(keeps)

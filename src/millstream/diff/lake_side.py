"""The lake's side of `diff`: the same sums and rows, by DuckDB over the rows at one token."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.diff.column_texts import HASH, RANGE, ComparedColumn, RowTexts
from millstream.diff.source_side import Sums
from millstream.errors import InvalidQuery, LakeError
from millstream.lake.column_conversion import texts_of, to_text
from millstream.model.names import quote
from millstream.model.records import PARTITION_OID

if TYPE_CHECKING:
    from millstream.lake.query.query_session import LakeSession

EXACT: Final = "__exact"


class LakeTable:
    """A table's rows in the lake, at the session's token. For one thread, with the session.

    Args:
        session: the session; with `partitions` if there are `left` ones.
        left: OIDs of partitions that left, whose rows are left out.

    Raises (any call):
        LakeError: the table can't be read.
    """

    def __init__(self, session: LakeSession, namespace: str, name: str, *, left: Collection[int] = ()) -> None:
        self._session = session
        self._view = f"{quote(namespace)}.{quote(name)}"
        self._schema = self._query(f"SELECT * FROM {self._view} LIMIT 0").schema
        if left and PARTITION_OID.name in self._schema.names:
            oids = ", ".join(map(str, sorted(left)))
            self._view = f"(FROM {self._view} WHERE coalesce({PARTITION_OID.name} NOT IN ({oids}), true))"
        self.with_exact: Final = EXACT in self._schema.names

    def types(self) -> dict[str, pa.DataType]:
        """Return the columns' types."""
        return {field.name: field.type for field in self._schema if field.name not in {EXACT, PARTITION_OID.name}}

    def count(self) -> int:
        """Return the number of rows."""
        rows: int = self._query(f"SELECT count(*) FROM {self._view}").column(0)[0].as_py()
        return rows

    def sums(self, texts: RowTexts) -> Sums:
        """Return the sums of all ranges."""
        found = self._query(
            f"SELECT {RANGE}, count(*), sum({HASH})::VARCHAR FROM ({texts.lake_sql(self._view, with_exact=self.with_exact)})"
            f" GROUP BY {RANGE}"
        )
        places, rows, totals = (column.to_pylist() for column in found.columns)
        return {place: (n, int(total)) for place, n, total in zip(places, rows, totals, strict=True)}

    def rows(self, texts: RowTexts, ranges: Collection[int]) -> Iterator[tuple[int, pa.Table]]:
        """Yield (range, its rows with their hashes), by range, for non-empty ranges; sorted on disk if memory is full.

        Exhaust or close the iterator before the session's next call.
        """
        wanted = ",".join(map(str, sorted(ranges)))
        query = (
            f"SELECT * FROM ({texts.lake_sql(self._view, with_exact=self.with_exact)})"
            f" WHERE {RANGE} IN (SELECT unnest([{wanted}])) ORDER BY {RANGE}"
        )
        held: list[pa.Table] = []
        place = -1
        with self._translated(), self._session.stream(query) as reader:
            for batch in reader:
                table = pa.Table.from_batches([batch])
                for here, some in _by_range(table):
                    if here != place and held:
                        yield place, pa.concat_tables(held)
                        held = []
                    place = here
                    held.append(some)
        if held:
            yield place, pa.concat_tables(held)

    @staticmethod
    @contextmanager
    def _translated() -> Iterator[None]:
        try:
            yield
        except InvalidQuery as error:
            raise LakeError(error.message, hint=error.hint) from error

    def _query(self, sql: str) -> pa.Table:
        with self._translated():
            return self._session.query(sql)


def _by_range(table: pa.Table) -> Iterator[tuple[int, pa.Table]]:
    """Yield the pieces of one range each, from rows sorted by range."""
    places = table.column(RANGE).to_numpy()
    starts = [0, *(np.flatnonzero(places[1:] != places[:-1]) + 1).tolist(), len(places)]
    for start, end in pairwise(starts):
        if end > start:
            yield int(places[start]), table.slice(start, end - start)


def row_texts(rows: pa.Table, columns: Collection[ComparedColumn]) -> list[tuple[str | None, ...]]:
    """Return each row's values from the lake as PostgreSQL would print them."""
    maps = rows.column(EXACT).combine_chunks() if EXACT in rows.column_names else None
    if maps is not None and maps.null_count == len(maps):
        maps = None
    found: list[list[str | None]] = []
    for column in columns:
        if column.lake is None:
            found.append([None] * rows.num_rows)
            continue
        values = rows.column(column.name).combine_chunks()
        texts = to_text(values if not pa.types.is_large_string(values.type) else values.cast(pa.string()))
        if maps is not None:
            texts = pc.coalesce(texts, texts_of(maps, column.name))
        found.append(texts.to_pylist())
    return list(zip(*found, strict=True)) if found else [()] * rows.num_rows

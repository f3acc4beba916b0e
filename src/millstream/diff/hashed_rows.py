"""The source's rows of a table with hashed columns: PostgreSQL can't compute the hashes, so they are computed here.

The key of the hashes doesn't leave this process, and a value to be hashed is replaced as soon as its row has come.
Nothing keeps it: no file, no log, no error. If the key has a hashed column, or there is none, the range of a row is
known here alone; so the rows of ranges that differ are then sorted here, on disk if memory is full.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from typing import Final

import pyarrow as pa

from millstream.capture.column_rules.apply_to_copies import NULL, plain_text
from millstream.capture.copying.copy_output import CopyText
from millstream.diff.column_texts import HASH_DIGITS, RowTexts

SourceRow = tuple[int, int, tuple[str | None, ...]]
"""Range, hash, and the columns' texts as PostgreSQL prints them, or their hashes."""

_SORT_MEMORY: Final = "256MB"
_BATCH_ROWS: Final = 10_000


class HashedRows:
    """Turns rows of `RowTexts.unhashed_sql` into rows with hashes.

    Args:
        hashed: returns what stands for a text in a hashed column.
    """

    def __init__(self, texts: RowTexts, hashed: Callable[[bytes], bytes]) -> None:
        self._texts = texts
        self._hashed = hashed
        self._places = range(_PARTS, _PARTS + len(texts.hashed))
        self._has_plain = bool(texts.plain)
        self._key = [texts.hashed.index(column) for column in texts.hashed_key]
        self._key_has_plain = len(self._key) < len(texts.key)

    def sums(self, pieces: Iterable[CopyText]) -> Iterator[tuple[int, int]]:
        """Yield (range, hash) of each row."""
        for line in _lines(pieces):
            yield self._row(line)[:2]

    def rows(self, pieces: Iterable[CopyText]) -> Iterator[SourceRow]:
        """Yield the rows."""
        for line in _lines(pieces):
            place, hashed, hashes = self._row(line)
            plain = [_text(value) for value in line[self._places.stop :]]
            yield place, hashed, (*plain, *(None if value is None else value.decode() for value in hashes))

    def _row(self, line: list[bytes]) -> tuple[int, int, list[bytes | None]]:
        hashes = [None if line[at] == NULL else self._hashed(plain_text(line[at])) for at in self._places]
        row = self._number(line[1], hashes, has_plain=self._has_plain)
        if line[0] != NULL:
            return int(line[0]), row, hashes
        if not self._texts.key:
            return row % self._texts.ranges, row, hashes
        key = self._number(line[2], [hashes[at] for at in self._key], has_plain=self._key_has_plain)
        return key % self._texts.ranges, row, hashes

    def _number(self, plain: bytes, hashes: list[bytes | None], *, has_plain: bool) -> int:
        """Return the hash of a record of plain values, whose text is given, and hashes, which need no quotes."""
        parts = [value or b"" for value in hashes]
        record = b",".join([plain_text(plain)[:-1], *parts] if has_plain else parts)
        text = (record if has_plain else b"(" + record) + b")"
        return int(hashlib.new(self._texts.hash_name, text, usedforsecurity=False).hexdigest()[:HASH_DIGITS], 16)


_PARTS: Final = 3
"""Columns before those to be hashed: the range, the plain columns as a record, and those of the key."""


def sorted_by_range(rows: Iterable[SourceRow], ranges: Collection[int], width: int) -> Iterator[SourceRow]:
    """Yield the rows of some ranges, by range; all are read at the first request, and kept on disk if memory is full."""
    import duckdb

    wanted = frozenset(ranges)
    some = (row for row in rows if row[0] in wanted)
    numbers = [("place", pa.int64()), ("hash", pa.int64())]
    schema = pa.schema([*numbers, *((f"c{number}", pa.string()) for number in range(width))])
    with (
        tempfile.TemporaryDirectory(prefix="millstream-diff-") as scratch,
        duckdb.connect(":memory:", config={"temp_directory": scratch, "memory_limit": _SORT_MEMORY}) as connection,
    ):
        connection.register("batch", schema.empty_table())
        connection.execute("CREATE TABLE kept AS FROM batch")
        while batch := list(islice(some, _BATCH_ROWS)):
            columns = zip(*((place, hashed, *values) for place, hashed, values in batch), strict=True)
            arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
            connection.register("batch", pa.table(arrays, schema=schema))
            connection.execute("INSERT INTO kept FROM batch")
        connection.unregister("batch")
        for kept in connection.sql("FROM kept ORDER BY place").to_arrow_reader(_BATCH_ROWS):
            for place, hashed, *values in zip(*(column.to_pylist() for column in kept.columns), strict=True):
                yield place, hashed, tuple(values)


def _lines(pieces: Iterable[CopyText]) -> Iterator[list[bytes]]:
    for piece in pieces:
        for line in piece.lines():
            yield line.split(b"\t")


def _text(value: bytes) -> str | None:
    return None if value == NULL else plain_text(value).decode(errors="replace")

"""Identity of rows: values of some columns, and PostgreSQL's text if a typed value can't hold one.

Codes compare rows of different tables: `key_codes` numbers the distinct rows of several sets at once. Nulls equal
nulls. As a key, -0.0 equals 0.0 (PostgreSQL's `=`); as a whole row it doesn't (its text differs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.crdt.columns import whole_column
from millstream.lake.column_conversion import text_maps, texts_of

Codes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Keys:
    """Rows' identities in columns, all of one length."""

    names: tuple[str, ...]
    columns: tuple[pa.Array, ...]
    exact: tuple[pa.Array | None, ...]
    """PostgreSQL's texts if `columns` is null because its type can't hold them; None: no row has any."""

    def __len__(self) -> int:
        return len(self.columns[0])

    @classmethod
    def of(cls, rows: pa.Table, names: Sequence[str]) -> Keys:
        """Return the identities of a table's rows; `__exact` is its map of texts, if it has one."""
        columns = tuple(whole_column(rows.column(name)) for name in names)
        maps = whole_column(rows.column("__exact")) if "__exact" in rows.column_names else None
        if maps is None or maps.null_count == len(maps):
            return cls(tuple(names), columns, tuple(None for _ in names))
        return cls(tuple(names), columns, tuple(_some(texts_of(maps, name)) for name in names))

    def take(self, indexes: npt.NDArray[np.int64]) -> Keys:
        """Return some of the rows."""
        at = pa.array(indexes)
        columns = tuple(column.take(at) for column in self.columns)
        return Keys(self.names, columns, tuple(None if e is None else _some(e.take(at)) for e in self.exact))

    def without(self, name: str) -> Keys:
        """Return the rows without a column."""
        kept = [place for place, own in enumerate(self.names) if own != name]
        columns, exact = (tuple(parts[place] for place in kept) for parts in (self.columns, self.exact))
        return Keys(tuple(self.names[place] for place in kept), columns, exact)

    def to_table(self) -> pa.Table:
        """Return the key columns alone."""
        return pa.table(list(self.columns), names=list(self.names))

    def with_texts(self) -> pa.Table:
        """Return the key columns, and the texts in `__exact`: the input of `of`."""
        texts = [pa.nulls(len(self), pa.string()) if e is None else e for e in self.exact]
        return self.to_table().append_column("__exact", text_maps(self.names, texts, len(self)))

    @property
    def typed(self) -> bool:
        """Whether the typed values alone distinguish all rows: no nulls, no texts."""
        return all(e is None for e in self.exact) and all(c.null_count == 0 for c in self.columns)


def having(rows: pa.Table, keys: Keys) -> pa.Table:
    """Return rows that may have one of the keys: their first key column holds one of the keys' values."""
    column, values = rows.column(keys.names[0]), keys.columns[0]
    if pa.types.is_floating(column.type) or pa.types.is_nested(column.type):
        return rows  # equal numbers may differ by their sign (0 and -0), and Arrow doesn't look lists up
    here = pc.is_in(column, value_set=values.drop_null().cast(column.type))
    return rows.filter(pc.or_(here, pc.is_null(column)) if values.null_count else here)


def key_codes(sets: Sequence[Keys], *, signed_zero: bool = False) -> list[Codes]:
    """Return, for each set, each row's code. Codes are equal exactly if the rows are equal, and not dense.

    Args:
        sets: of the same columns and types.
        signed_zero: whether -0.0 differs from 0.0.
    """
    if all(keys.typed and len(keys.columns) == 1 and pa.types.is_integer(keys.columns[0].type) for keys in sets):
        # The most common key is its own code: no table of all keys need be built.
        return [np.asarray(keys.columns[0].to_numpy(zero_copy_only=False), np.int64) for keys in sets]
    lengths = [len(keys) for keys in sets]
    codes = np.zeros(sum(lengths), np.int64)
    room = 1
    for place in range(len(sets[0].columns)):
        parts = [_codes(pa.concat_arrays([keys.columns[place] for keys in sets]), signed_zero=signed_zero)]
        if any(keys.exact[place] is not None for keys in sets):
            texts = [
                pa.nulls(n, pa.string()) if k.exact[place] is None else k.exact[place]
                for k, n in zip(sets, lengths, strict=True)
            ]
            parts.append(_codes(pa.concat_arrays(texts), signed_zero=signed_zero))
        for part in parts:
            size = int(part.max()) + 1 if len(part) else 1
            if room * size >= 2**62:
                codes = np.unique(codes, return_inverse=True)[1].astype(np.int64)
                room = int(codes.max()) + 1
            codes = codes * size + part
            room *= size
    return list(np.split(codes, np.cumsum(lengths)[:-1]))


def concat_keys(one: Keys, other: Keys) -> Keys:
    """Concatenate the rows of both, of the same columns."""
    exact: list[pa.Array | None] = []
    for a, b in zip(one.exact, other.exact, strict=True):
        if a is None and b is None:
            exact.append(None)
            continue
        left = pa.nulls(len(one), pa.string()) if a is None else a
        right = pa.nulls(len(other), pa.string()) if b is None else b
        exact.append(pa.concat_arrays([left, right]))
    columns = tuple(pa.concat_arrays([a, b]) for a, b in zip(one.columns, other.columns, strict=True))
    return Keys(one.names, columns, tuple(exact))


def last_of_each(codes: Codes) -> npt.NDArray[np.int64]:
    """Return the index of each code's last occurrence, ascending by code."""
    order, grouped = _grouped(codes)
    return order[np.flatnonzero(np.append(grouped[1:] != grouped[:-1], True))] if len(codes) else order


def first_of_each(codes: Codes) -> npt.NDArray[np.int64]:
    """Return the index of each code's first occurrence, ascending by code."""
    order, grouped = _grouped(codes)
    return order[np.flatnonzero(np.append(True, grouped[1:] != grouped[:-1]))] if len(codes) else order


def _grouped(codes: Codes) -> tuple[npt.NDArray[np.int64], Codes]:
    """Return indexes by their codes, ascending within one, and for each a value that distinguishes its code."""
    if not len(codes):
        return np.zeros(0, np.int64), codes
    bits = len(codes).bit_length()
    low = int(codes.min())
    if (int(codes.max()) - low).bit_length() + bits > 63:
        order = np.argsort(codes, kind="stable")
        return order, codes[order]
    # Sorting numbers is some ten times as fast as sorting indexes by them.
    both = ((codes - low) << bits) | np.arange(len(codes))
    both.sort()
    return both & ((1 << bits) - 1), both >> bits


def _codes(values: pa.Array, *, signed_zero: bool) -> Codes:
    if pa.types.is_nested(values.type):
        values = pa.array([None if v is None else repr(v) for v in values.to_pylist()], pa.string())
    if pa.types.is_floating(values.type):
        if signed_zero:
            bits = np.int32 if values.type == pa.float32() else np.int64
            plain = values.fill_null(0).to_numpy(zero_copy_only=False)
            plain = np.where(np.isnan(plain), np.nan, plain).astype(plain.dtype)
            values = pa.array(plain.view(bits), mask=np.asarray(values.is_null()))
        else:
            values = pc.add(values, pa.scalar(0.0, values.type))
    return np.asarray(pc.dictionary_encode(values, null_encoding="encode").indices, np.int64)


def _some(texts: pa.Array) -> pa.Array | None:
    return None if texts.null_count == len(texts) else texts

"""JSON texts by the column: strings as JSON writes them, and objects with a member for each of several columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.delivery.kafka.debezium_values import quoted

TEXTS: Final = pa.large_string()
"""The type of arrays of JSON: a batch of large values exceeds the 2 GiB of `string`."""
_ESCAPED: Final = r'[[:cntrl:]"\\]'


def joined(*parts: str | pa.Array) -> pa.Array:
    """Return texts of the same text or of an array's value for each part; null where an array is. One is an array."""
    texts = [pa.scalar(part, TEXTS) if isinstance(part, str) else part for part in parts]
    return pc.binary_join_element_wise(*texts, pa.scalar("", TEXTS))


def quoted_column(array: pa.Array) -> pa.Array:
    """Return a column of texts as JSON strings, as `debezium_values.quoted` writes each; null for NULL."""
    texts = array.cast(TEXTS)
    strings = joined('"', texts, '"')
    if not _may_have_escapes(texts):
        return strings
    escaped = pc.fill_null(pc.match_substring_regex(texts, _ESCAPED), fill_value=False)
    return pc.replace_with_mask(strings, escaped, pa.array(map(quoted, texts.filter(escaped).to_pylist()), TEXTS))


def _may_have_escapes(texts: pa.LargeStringArray) -> bool:
    """Return whether a byte of the values is one that a JSON string writes in another way."""
    _, offsets, data = texts.buffers()
    if data is None or not len(texts):
        return False
    ends = np.frombuffer(offsets, dtype=np.int64)
    own = np.frombuffer(data, dtype=np.uint8)[ends[texts.offset] : ends[texts.offset + len(texts)]]
    return bool(np.any((own < 0x20) | (own == ord('"')) | (own == ord("\\"))))


@dataclass(frozen=True, slots=True)
class Template:
    """A JSON object with given names."""

    pieces: tuple[str, ...]
    """The text before the first value, between each two, and behind the last."""

    @classmethod
    def of(cls, names: Iterable[str]) -> Template:
        """Return the template of an object with these members."""
        heads = [f"{quoted(name)}:" for name in names]
        if not heads:
            return cls(("{}",))
        return cls(("{" + heads[0], *("," + head for head in heads[1:]), "}"))

    def text(self, values: Iterable[str]) -> str:
        """Return the object of these values, which are JSON."""
        return "".join(chain.from_iterable(zip(self.pieces, chain(values, repeat("")), strict=False)))

    def parts(self, columns: Sequence[pa.Array]) -> list[str | pa.Array]:
        """Return the objects of columns' values as parts for `joined`."""
        return list(chain.from_iterable(zip(self.pieces, chain(columns, repeat("")), strict=False)))

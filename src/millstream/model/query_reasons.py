"""The reasons why tables of a query may lack rows of the source: how an answer lists them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pyarrow as pa

REASONS_METADATA: Final = b"millstream.reasons"
"""Key of the list, as JSON, in the metadata of an Arrow schema."""
REASONS_HEADER: Final = "Millstream-Reasons"
_HEADER_MAX: Final = 8 << 10
"""Characters of the header: clients and proxies refuse longer ones."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason."""

    code: str
    """`lake_behind`, `quarantined`, `copy_requested`, `copying`, `copy_held` or `gone`."""
    table: str
    """The table's name; empty if it holds for all tables."""
    detail: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.code, self.table, self.detail)))


def as_json(reasons: Sequence[Reason]) -> str:
    """Return the list as an answer has it: `[{"code": "copying", "table": "public.orders", "detail": "…"}, …]`."""
    return json.dumps([asdict(reason) for reason in reasons])


def as_header(reasons: str) -> str:
    """Return the list for a header: without its last entries if it is too long for one."""
    if len(reasons) <= _HEADER_MAX:
        return reasons
    kept: list[str] = []
    left = _HEADER_MAX - len("[]")
    for entry in map(json.dumps, json.loads(reasons)):
        left -= len(entry) + len(", ") * bool(kept)
        if left < 0:
            break
        kept.append(entry)
    return f"[{', '.join(kept)}]"


def with_reasons(schema: pa.Schema, reasons: Sequence[Reason]) -> pa.Schema:
    """Return a schema with the list in its metadata; unchanged if there are none."""
    if not reasons:
        return schema
    return schema.with_metadata({**(schema.metadata or {}), REASONS_METADATA: as_json(reasons).encode()})

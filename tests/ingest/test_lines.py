"""Lines of InfluxDB's line protocol as tables: every rule, at its edge and over it."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from millstream.ingest.lines import Lines, tables_of_lines

NOW_NS = 1_700_000_000_123_456_789


def lines_of(body: bytes | str, precision: str = "ns", **limits: int) -> Lines:
    return tables_of_lines(
        body.encode() if isinstance(body, str) else body, precision=precision, now_ns=NOW_NS, **limits
    )


def one_row(body: bytes | str) -> dict[str, Any]:
    """The row of a body of one line, without its time."""
    found = lines_of(body)
    assert found.rejected == []
    (table,) = found.tables
    (row,) = table.rows.to_pylist()
    return {name: value for name, value in row.items() if name not in {"time", "time_ns"}}


def test_a_line_of_every_type():
    row = one_row('cpu,host=a u=1.5,n=-3i,k=7u,ok=t,s="x \\"q\\" \\\\ \n y" 1700000000000000000')
    assert row == {"host": "a", "u": 1.5, "n": -3, "k": Decimal(7), "ok": True, "s": 'x "q" \\ \n y'}

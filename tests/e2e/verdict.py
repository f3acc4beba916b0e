"""The end of every end-to-end test: a judge that shares no code with the product compares the lake with its source."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psycopg
from deltalake import DeltaTable
from psycopg import sql

from millstream.testing.oracle import (
    TableRows,
    check_order,
    check_transactions,
    current_rows,
    difference,
    replay_history,
    source_rows,
    table_folder,
)
from millstream.testing.workloads.workload import StepInfo

MESSAGES = "_messages"


def judge(
    lake: Path,
    connection: psycopg.Connection[Any],
    tables: Iterable[tuple[str, str]],
    steps: Iterable[StepInfo],
    *,
    history_only: Iterable[tuple[str, str]] = (),
) -> list[str]:
    """Return the errors of the lake's tables; empty if there are none.

    Args:
        lake: the stream's folder.
        connection: to the source, which no longer changes.
        tables: (schema, table) of the tables with `current` and `history`.
        steps: all transactions since the slot was made.
        history_only: (schema, table) of the tables without a usable identity.
    """
    problems: list[str] = []
    histories: dict[str, Path] = {}
    for schema, table in (*tables, *history_only):
        quoted = sql.Identifier(schema, table).as_string(connection)
        histories[f"{_plain(connection, schema)}.{_plain(connection, table)}"] = table_folder(
            lake / "history", schema, table
        )
        if (schema, table) in set(history_only):
            continue
        source = as_told(source_rows(connection, quoted), table_folder(lake / "history", schema, table))
        again = copied_again(histories_of(lake, schema, table))
        replay = replay_history(histories_of(lake, schema, table), source, recopied=again > 0)
        problems += [f"{quoted}, replay: {line}" for line in difference(replay.rows, source)]
        problems += [f"{quoted}, history: {line}" for line in replay.violations if not excused(line, again)]
        if source.key:
            current = current_rows(table_folder(lake / "current", schema, table), source)
            problems += [f"{quoted}, current: {line}" for line in difference(current, source)]
    if (lake / "history" / MESSAGES).exists():
        histories[MESSAGES] = lake / "history" / MESSAGES
    problems += check_order(histories)
    expected = [(step.xid, step.events) for step in steps if step.committed and step.xid is not None]
    problems += check_transactions(histories, expected)
    return problems


def histories_of(lake: Path, schema: str, table: str) -> Path:
    """Return the folder of a table's history."""
    return table_folder(lake / "history", schema, table)


def copied_again(history: Path) -> int:
    """Return the number of the last truncate that began a copy (it has no index in a transaction); 0 without one.

    A table's first copy begins with one only if it has no key and the log had records of it already; all others do.
    """
    table = DeltaTable(str(history)).to_pyarrow_table(columns=["__op", "__seq", "__commit_index"])
    marks = [r["__seq"] for r in table.to_pylist() if r["__op"] == "t" and r["__commit_index"] is None]
    return max(marks, default=0)


def excused(violation: str, again: int) -> bool:
    """Return whether a copy explains the violation.

    Before the copy, the table may have had rows that the log didn't have. During it, changes may precede the
    copied row that they change.
    """
    return again > 0 and (seq_in(violation) < again or "is gone" in violation or "isn't there" in violation)


def seq_in(violation: str) -> int:
    """Return the first number in a violation."""
    return int(violation.split()[1])


def as_told(source: TableRows, history: Path) -> TableRows:
    """Return the source's rows without columns that the stream hasn't described so far, if these hold only nulls.

    PostgreSQL describes a table in the stream when it changes a row, not when a column is added.
    """
    there = set(DeltaTable(str(history)).schema().to_arrow().names)
    untold = [i for i, name in enumerate(source.columns) if name not in there]
    rows = [*source.rows.values(), *source.bag]
    if not untold or any(row[i] is not None for row in rows for i in untold):
        return source
    kept = [i for i, name in enumerate(source.columns) if name in there]
    told = TableRows(tuple(source.columns[i] for i in kept), source.key)
    for row, count in [*((row, 1) for row in source.rows.values()), *source.bag.items()]:
        for _ in range(count):
            told.add(tuple(row[i] for i in kept))
    return told


def _plain(connection: psycopg.Connection[Any], name: str) -> str:
    """Quote a name as PostgreSQL does: only if necessary."""
    row = connection.execute("SELECT quote_ident(%s)", [name]).fetchone()
    assert row is not None
    return str(row[0])

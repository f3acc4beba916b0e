"""The end of every end-to-end test: the lake held against its source by a judge that shares no code with the product."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from millstream.testing.oracle import (
    check_order,
    check_transactions,
    current_rows,
    difference,
    replay_history,
    source_rows,
    table_folder,
)
from millstream.testing.workload import StepInfo

MESSAGES = "_messages"


def judge(
    lake: Path,
    connection: psycopg.Connection[Any],
    tables: Iterable[tuple[str, str]],
    steps: Iterable[StepInfo],
    *,
    history_only: Iterable[tuple[str, str]] = (),
) -> list[str]:
    """What is wrong with the lake's tables; empty when nothing is.

    Args:
        lake: the stream's folder.
        connection: to the source, quiet by now.
        tables: (schema, table) of those with `current` and `history`.
        steps: all transactions since the slot was made.
        history_only: (schema, table) of those that have no usable identity.
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
        source = source_rows(connection, quoted)
        replay = replay_history(table_folder(lake / "history", schema, table), source)
        problems += [f"{quoted}, replay: {line}" for line in difference(replay.rows, source)]
        problems += [f"{quoted}, history: {line}" for line in replay.violations]
        if source.key:
            current = current_rows(table_folder(lake / "current", schema, table), source)
            problems += [f"{quoted}, current: {line}" for line in difference(current, source)]
    if (lake / "history" / MESSAGES).exists():
        histories[MESSAGES] = lake / "history" / MESSAGES
    problems += check_order(histories)
    expected = [(step.xid, step.events) for step in steps if step.committed and step.xid is not None]
    problems += check_transactions(histories, expected)
    return problems


def _plain(connection: psycopg.Connection[Any], name: str) -> str:
    """A name as PostgreSQL quotes it: only where it must be."""
    row = connection.execute("SELECT quote_ident(%s)", [name]).fetchone()
    assert row is not None
    return str(row[0])

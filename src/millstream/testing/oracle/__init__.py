"""An independent judge: the rows of a source, the rows of lake tables, and the replay of a history to the source.

Nothing here shares code with the rest of Millstream: psycopg reads PostgreSQL, deltalake reads lake tables, and a
separate renderer turns values into PostgreSQL's text. The judge compares the product's output with PostgreSQL's own
text, never with the product's own reading. It only handles data that fits into memory.

    source = source_rows(connection, "public.orders")
    assert not difference(current_rows("lake/shop/current/public.orders", source), source)
    replay = replay_history("lake/shop/history/public.orders", source)
    assert not replay.violations
    assert not difference(replay.rows, source)
    assert not check_order({"public.orders": "lake/shop/history/public.orders"})
"""

from millstream.testing.oracle.history import Replay, check_order, check_transactions, replay_history
from millstream.testing.oracle.lake import check_types, current_rows, table_folder
from millstream.testing.oracle.source import source_rows
from millstream.testing.oracle.table_rows import TableRows, difference

__all__ = [
    "Replay",
    "TableRows",
    "check_order",
    "check_transactions",
    "check_types",
    "current_rows",
    "difference",
    "replay_history",
    "source_rows",
    "table_folder",
]

"""An independent judge: what a source holds, what lake tables hold, and whether a history replays to the source.

Nothing here shares code with the rest of Millstream: PostgreSQL is read by psycopg, lake tables by deltalake, values are
turned into PostgreSQL's text by a renderer of its own. What the product writes is compared with what PostgreSQL itself
prints, never with the product's own reading. Everything fits into memory or it isn't for this judge.

    source = source_rows(connection, "public.orders")
    assert not difference(current_rows("lake/shop/current/public.orders", source), source)
    replay = replay_history("lake/shop/history/public.orders", source)
    assert not replay.violations
    assert not difference(replay.rows, source)
    assert not check_order({"public.orders": "lake/shop/history/public.orders"})
"""

from millstream.testing.oracle.history import Replay, check_order, check_transactions, replay_history
from millstream.testing.oracle.lake import check_types, current_rows, table_folder
from millstream.testing.oracle.source import TableRows, difference, source_rows

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

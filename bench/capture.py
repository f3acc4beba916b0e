"""Capture beside `pg_recvlogical`, table copy beside COPY, and capture's memory."""

from __future__ import annotations

from collections.abc import Iterator

from bench.figures import Figure, compared, measures, say
from bench.ours import PGOUTPUT, captured
from bench.places import folder
from bench.source import SHAPE, Backlog, make_backlog, postgres, recvlogical_rows_s
from millstream.codec.pgoutput import warm

_LIKE_WITH_LIKE = (
    "both read copies of one slot over the Unix socket with the same pgoutput options (proto_version 2, streaming on, messages"
    " true, text); timed from the answer to START_REPLICATION until the last commit is durable in our log (typed Arrow, LZ4,"
    " CRC32C, fdatasync a commit group), or pg_recvlogical, writing to /dev/null, has ended; our machine code was compiled before"
)


def _captured_rows_s(backlog: Backlog) -> float:
    with (
        backlog.copied_slot() as slot,
        folder("capture") as path,
        captured(backlog.server, path, table=backlog.name, slot=slot) as capture,
    ):
        ended_at = capture.wait_until_durable(backlog.end)
        rows_s = backlog.rows / (ended_at - capture.began_at)
        found = capture.writer.stats().records
        if found < backlog.rows:
            raise AssertionError(f"{found} records are in the log, {backlog.rows} rows were committed")
        return rows_s


def _beside_recvlogical(name: str, table: str, *, transactions: int, rows_each: int, goal: str) -> Figure:
    say(f"{name}: {transactions:,} transactions of {rows_each:,} rows")
    warm()
    with postgres() as server:
        backlog = make_backlog(server, table, transactions=transactions, rows_each=rows_each)
        return compared(
            name,
            lambda: _captured_rows_s(backlog),
            lambda: recvlogical_rows_s(backlog, options=PGOUTPUT),
            unit="rows/s",
            goal=goal,
            rows=backlog.rows,
            size_bytes=backlog.size_bytes,
            note=f"{transactions} transactions of {rows_each} rows; {SHAPE}; {_LIKE_WITH_LIKE}",
        )


@measures("capture_stream_vs_pg_recvlogical")
def stream() -> Iterator[Figure]:
    """Mid-size transactions."""
    yield _beside_recvlogical(
        "capture_stream_vs_pg_recvlogical", "mid", transactions=500, rows_each=1000, goal=">= 1.0"
    )


@measures("capture_small_tx_vs_pg_recvlogical")
def small_transactions() -> Iterator[Figure]:
    """One row a transaction."""
    yield _beside_recvlogical(
        "capture_small_tx_vs_pg_recvlogical", "small", transactions=100_000, rows_each=1, goal=">= 0.9"
    )

"""Runs of messages to operations in machine code."""

from __future__ import annotations

from collections.abc import Collection

from millstream.codec.pgoutput.plain import decode_block_plain, decode_plain
from millstream.codec.pgoutput.relations import RelationCache, TableDirectory
from millstream.codec.pgoutput.runs import MessageRun
from millstream.model.operations import TableRows, WriteOps
from millstream.model.positions import Lsn


def decode_transactions(
    run: MessageRun, directory: TableDirectory, relations: RelationCache, *, after: Lsn = Lsn(0)
) -> WriteOps:
    """Decode a run; see the package's docstring for what a run is."""
    return decode_plain(run, directory, relations, after=after)


def decode_block(
    run: MessageRun,
    directory: TableDirectory,
    relations: RelationCache,
    *,
    streamed: bool,
    aborted: Collection[int],
    first_index: int,
) -> tuple[tuple[TableRows, ...], int]:
    """Decode a part of one transaction, as `decode_block_plain` does."""
    return decode_block_plain(run, directory, relations, streamed=streamed, aborted=aborted, first_index=first_index)


def warm() -> None:
    """Compile."""

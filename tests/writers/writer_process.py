"""One of several writer processes of a stream: it appends without end, and prints each answer.

`main`, with the words FOLDER, ADDRESS, NAME and LEASE_S, prints `open EPOCH`, then `try TEXT` for each
operation. An operation's answer is `ack TEXT SEQ` once it is durable, `unknown TEXT` if its outcome is unknown,
and `refused TEXT` if it isn't in the log. The process ends with status 3 when the writer is lost.
"""

from __future__ import annotations

import os
import random
import time
from typing import NoReturn
from uuid import UUID

from tests.catalog.sequencing import UnreliableAnnouncements
from tests.wal.plain_operations import plain_ops, plain_table

from millstream.catalog import Catalog
from millstream.catalog.writer_notifications import PostgresAnnouncements
from millstream.errors import AppendOutcomeUnknown, CatalogError, MillstreamError, StaleEpoch, WriterClosed
from millstream.model.ids import StreamId
from millstream.wal.writing.writer import LogOptions
from millstream.writers.leased_writer import OneOfSeveral

TABLES = plain_table(1), plain_table(2)
ROWS = 6
"""Rows of an operation, half of them on each of the writer's two shards."""
LOST = 3


_answers = 1


def say(*words: object) -> None:
    os.write(_answers, (" ".join(map(str, words)) + "\n").encode())


def keep_log_lines_apart() -> None:
    """Redirect everything else that this process prints to stderr.

    A long log line is several writes, and an answer may fall between.
    """
    global _answers  # noqa: PLW0603 - one process, one descriptor
    _answers = os.dup(1)
    os.dup2(2, 1)


def append_without_end(folder: str, address: str, name: str, lease_s: float) -> int:
    stream = StreamId(UUID(int=11))
    with Catalog(address) as catalog:
        catalog.resolve_stream("shop", found=stream)
        writer = OneOfSeveral.open(
            catalog, stream, folder, name=name, location="here", lease_s=lease_s, shard_count=2,
            options=LogOptions(segment_bytes=60_000, disk_used_max=1.0),
            announcements=UnreliableAnnouncements(PostgresAnnouncements(catalog.database, stream), random.Random(name)),
        )  # fmt: skip
        say("open", *writer.shards)
        number = 0
        while True:
            number += 1
            text = f"{name}.{os.getpid()}.{number}"
            say("try", text)
            rows = [(table, ROWS // 2, text) for table in TABLES]
            ops = plain_ops({number: rows}, shard_of={1: writer.shards[0], 2: writer.shards[1]})
            try:
                say("ack", text, writer.log.append(ops).seqs.first)
            except AppendOutcomeUnknown:
                say("unknown", text)
                return LOST
            except (StaleEpoch, WriterClosed):
                say("refused", text)
                return LOST
            except CatalogError:
                say("refused", text)
                time.sleep(0.05)


def main(words: list[str]) -> NoReturn:
    folder, address, name, lease_s = words
    keep_log_lines_apart()
    try:
        status = append_without_end(folder, address, name, float(lease_s))
    except MillstreamError as error:
        say("failed", error.code, error.message)
        status = LOST
    os._exit(status)  # as a crash would: nothing is sealed or settled

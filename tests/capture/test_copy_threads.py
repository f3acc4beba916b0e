"""The threads that read chunks: their end, whenever it comes."""

from __future__ import annotations

import threading
from typing import cast

import pytest
from tests.capture.beside import Beside, wait_until

from millstream.capture.connection import Connection, connect, translated
from millstream.capture.copying.chunk_reader import ChunkReader
from millstream.capture.copying.copy_threads import ChunkWorkers
from millstream.testing.pytest_plugin import Database


@pytest.mark.parametrize("begins", ["to connect", "its query"])
def test_a_query_that_begins_while_the_threads_are_stopped_is_cancelled_too(postgres: Database, begins: str) -> None:
    """Each connection's query was cancelled once: one that began just afterwards was waited for, however long it took."""
    has_come, goes_on, cancelled = threading.Event(), threading.Event(), threading.Event()

    def opened(purpose: str) -> Connection:
        if begins == "to connect":
            has_come.set()
            assert goes_on.wait(60)
        connection = connect(postgres.dsn, purpose=purpose)
        cancel = connection.cancel_safe

        def noted(*, timeout: float) -> None:
            cancel(timeout=timeout)
            cancelled.set()

        connection.cancel_safe = noted  # type: ignore[method-assign]
        return connection

    def read(reader: ChunkReader) -> None:
        if begins == "its query":
            has_come.set()
            assert goes_on.wait(60)
        with translated():
            cast("Connection", reader).execute("SELECT pg_sleep(60)")

    workers = ChunkWorkers[str](
        "copy",
        1,
        connect=opened,
        reader=lambda connection: cast("ChunkReader", connection),
        wanted=lambda _: True,
        gone=lambda _: False,
        failed=lambda *_: None,
        name_of=str,
        broken=lambda: None,
    )
    workers.start()
    workers.queue("docs", read)
    assert has_come.wait(60)
    ending = Beside(workers.stop)
    wait_until(lambda: workers._stopped if begins == "to connect" else cancelled.is_set(), "it ends")
    goes_on.set()
    ending.ended(20)

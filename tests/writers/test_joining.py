"""A writer joins a stream again and again on a real PostgreSQL, while others append and read after their tokens."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest
from tests.app.homes import wait_for
from tests.commands import Command
from tests.refused_threads import refused_threads
from tests.wal.plain_operations import plain_ops, plain_table
from tests.writers.joining_reader import look

from millstream.catalog import Catalog
from millstream.model.ids import StreamId
from millstream.model.positions import Seq, StreamToken
from millstream.testing.pytest_plugin import Database
from millstream.wal.reader import StreamReader
from millstream.writers.leased_writer import OneOfSeveral

STREAM = StreamId(UUID(int=11))
TABLE = plain_table(1)
JOINS = 15


class Joined:
    """A stream's catalog and folder, and its writers' acknowledged operations."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder
        self._address = address
        self.acknowledged: list[Seq] = []

    def opened(self, name: str) -> OneOfSeveral:
        catalog = Catalog(self._address)
        catalog.resolve_stream("shop", found=STREAM)
        return OneOfSeveral.open(
            catalog, STREAM, str(self.folder), name=name, location="here", lease_s=30.0, shard_count=2
        )

    def append(self, writer: OneOfSeveral, number: int) -> Seq:
        ops = plain_ops({number: [(TABLE, 2, "x")]}, shard_of={1: writer.shards[number % 2]})
        last = writer.log.append(ops).seqs.last
        self.acknowledged += [Seq(last - 1), last]
        return last


@pytest.fixture
def joined(tmp_path: Path, postgres: Database) -> Joined:
    return Joined(tmp_path / "shop", postgres.dsn)


@pytest.mark.parametrize("refused", ["writer-calls", "writer-a"])
def test_a_writer_whose_thread_is_refused_gives_its_log_back(joined: Joined, refused: str) -> None:
    """Regression: the log and its threads went on without an owner, and kept the shards' locks."""
    before = set(threading.enumerate())
    with refused_threads(refused), pytest.raises(OSError, match="no more threads"):
        joined.opened("a")
    wait_for(lambda: set(threading.enumerate()) <= before)
    with joined.opened("a") as writer:
        joined.append(writer, 1)


@pytest.mark.siege
def test_no_token_goes_back_while_a_second_writer_is_started_again_and_again(joined: Joined, tmp_path: Path) -> None:
    done = threading.Event()
    until = tmp_path / "done"
    wrong: list[BaseException] = []
    seen: set[int] = set()
    tokens: list[StreamToken] = []

    def append_on() -> None:
        number = 0
        while not done.is_set():
            number += 1
            joined.append(first, number)

    def read_on() -> None:
        reader = StreamReader(str(joined.folder))
        token = StreamToken.scalar(STREAM, Seq(0))
        while not wrong:
            is_last = done.is_set()
            token = look(reader, token, seen)
            tokens.append(token)
            if is_last:
                return

    def noting_errors(work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised at the end
                wrong.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    with joined.opened("first") as first:
        joined.append(first, 0)
        threads = [noting_errors(append_on), noting_errors(read_on)]
        elsewhere = Command(
            [str(joined.folder), str(until)],
            stdout=subprocess.PIPE,
            text=True,
            begins="tests.writers.joining_reader:main",
        )
        try:
            for number in range(JOINS):
                with joined.opened("second") as second:
                    joined.append(second, number)
        finally:
            done.set()
            for thread in threads:
                thread.join()
            until.touch()
            said, _ = elsewhere.communicate(timeout=60)
    if wrong:
        raise wrong[0]
    assert elsewhere.returncode == 0, said
    assert len(tokens) > JOINS
    looks, rows = map(int, said.split())
    assert looks > 1
    assert rows == len(joined.acknowledged), "each row once, the last ones in the last read"
    reader = StreamReader(str(joined.folder))
    look(reader, tokens[-1], seen)
    assert seen == set(joined.acknowledged)

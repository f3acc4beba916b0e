"""Numbers for many writers: draws (the peer is a sequence), the end of a range, a start, and two writers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import psycopg

from bench.figures import Figure, asked, compared, measures
from bench.places import folder
from bench.wal import BATCH_ROWS, ROW_BYTES, operation
from millstream.catalog import Catalog
from millstream.catalog.shared_sequence import PostgresSequenceStore
from millstream.model.ids import Epoch, StreamId, WriterId
from millstream.model.positions import Seq, SeqRange
from millstream.protocol.sequencer import WriterNumbers
from millstream.testing import EmbeddedPostgres
from millstream.wal.writing.options import LogOptions
from millstream.writers.leased_writer import OneOfSeveral

WRITERS = 8
GROUP = 100
DRAWING_S = 3.0
ENDINGS = 20_000
FEW, MANY = 100, 10_000
LONG = 10_000_000
APPENDS = 150
_STREAM = StreamId(UUID(int=7))


@measures("sequencer_pg_vs_nextval")
def drawn_and_nextval() -> Iterator[Figure]:
    """Measure eight threads that draw groups of a hundred; the peers are as many clients of a sequence."""
    with (
        folder("sequencer") as path,
        EmbeddedPostgres(data_dir=path / "pg") as server,
        Catalog(server.dsn()) as catalog,
    ):
        stream = catalog.resolve_stream("bench", found=_STREAM)
        with server.connect() as connection:
            connection.execute("CREATE SEQUENCE plain")

        def drawn() -> float:
            return _by_all(lambda number, end: _draw(catalog, stream, f"w{number}", end))

        def nextval() -> float:
            return _by_all(lambda _, end: _nextval(server.dsn(), end))

        yield compared(
            "sequencer_pg_vs_nextval",
            drawn,
            nextval,
            unit="numbers/s",
            goal="reported",
            rows=0,
            size_bytes=0,
            note=f"{WRITERS} writers draw {GROUP} numbers at a time for {_drawing_s():.0f} s, each draw with the writer's position, from numbers that are reserved durably; the peer is as many"
            " clients that draw as many a round trip, by nextval over generate_series; PostgreSQL 18 with fsync over a Unix socket, clients are threads of one process",
        )


def _drawing_s() -> float:
    return asked.seconds or DRAWING_S


def _by_all(work: Callable[[int, float], int]) -> float:
    """Return the numbers a second of all writers together."""
    counts = [0] * WRITERS
    end = time.perf_counter() + _drawing_s()

    def run(number: int) -> None:
        counts[number] = work(number, end)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(WRITERS)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - began)


def _draw(catalog: Catalog, stream: StreamId, name: str, end: float) -> int:
    store = PostgresSequenceStore(catalog.database, stream)
    own = store.register(name, "bench")
    position = store.recovered(own.writer, own.epoch).given.last
    count = 0
    while time.perf_counter() < end:
        position = store.draw(own.writer, own.epoch, GROUP, position=position).given.last
        count += GROUP
    store.settle(own.writer, own.epoch)
    store.close()
    return count


def _nextval(address: str, end: float) -> int:
    with psycopg.connect(address, autocommit=True) as connection:
        count = 0
        while time.perf_counter() < end:
            connection.execute("SELECT nextval('plain') FROM generate_series(1, %s)", [GROUP]).fetchall()
            count += GROUP
    return count


@measures("sequencer_finish_cost_100_vs_10000")
def ended_among_few_and_many() -> Iterator[Figure]:
    """Measure ending a range, in no order, and drawing another, with so many in flight."""
    yield compared(
        "sequencer_finish_cost_100_vs_10000",
        lambda: _ending_us(MANY),
        lambda: _ending_us(FEW),
        unit="µs",
        goal="<= 2",
        rows=0,
        size_bytes=0,
        note=f"ending a range in the middle and being given another, {ENDINGS} times; ours with {MANY} in flight, the peer with {FEW}",
    )


def _ending_us(in_flight: int) -> float:
    numbers = WriterNumbers(WriterId(1), Epoch(1), Seq(0))
    newest = 0
    flying: list[SeqRange] = []

    def give() -> None:
        nonlocal newest
        numbers.asks()
        flying.append(SeqRange(Seq(newest + 1), 1))
        numbers.given(flying[-1])
        newest += 1

    for _ in range(in_flight):
        give()
    began = time.perf_counter()
    for turn in range(ENDINGS):
        place = turn * 7919 % in_flight
        flying[place], flying[-1] = flying[-1], flying[place]
        numbers.finish(flying.pop())
        give()
    return (time.perf_counter() - began) / ENDINGS * 1e6


@measures("sequencer_startup_ms")
def started_behind_few_and_many() -> Iterator[Figure]:
    """Measure registering, recovering and becoming ready to draw, after ten numbers and after ten million."""
    with (
        folder("sequencer") as path,
        EmbeddedPostgres(data_dir=path / "pg") as server,
        Catalog(server.dsn()) as catalog,
    ):
        long = 10 * (asked.rows or LONG // 10)
        streams = {given: catalog.resolve_stream(f"given{given}") for given in (10, long)}
        for given, stream in streams.items():
            store = PostgresSequenceStore(catalog.database, stream)
            own = store.register("w", "bench")
            position = store.recovered(own.writer, own.epoch).given.last
            for _ in range(10):
                position = store.draw(own.writer, own.epoch, given // 10, position=position).given.last
            store.close()

        def started_ms(given: int) -> float:
            began = time.perf_counter()
            store = PostgresSequenceStore(catalog.database, streams[given])
            own = store.register("w", "bench")
            position = store.recovered(own.writer, own.epoch).given.last
            store.draw(own.writer, own.epoch, 1, position=position)
            took_ms = (time.perf_counter() - began) * 1000
            store.close()
            return took_ms

        yield compared(
            "sequencer_startup_ms",
            lambda: started_ms(long),
            lambda: started_ms(10),
            unit="ms",
            goal="<= 1.5",
            rows=0,
            size_bytes=0,
            note=f"from registering a writer that was killed to its first number; ours in a stream of {long:,} numbers, the peer in one of 10",
        )


@measures("sequencer_two_writers_vs_one")
def two_writers_and_one() -> Iterator[Figure]:
    """Measure two processes that append to one stream, each on a shard of its own; the peer is one alone."""
    with folder("sequencer") as path, EmbeddedPostgres(data_dir=path / "pg") as server:
        with Catalog(server.dsn()):
            pass
        runs = iter(range(1000))
        appends = APPENDS if asked.rows is None else max(1, asked.rows // BATCH_ROWS)

        def appended(writers: int) -> float:
            log = path / f"log{next(runs)}"
            command = [sys.executable, "-m", "bench.sequencer", str(log), server.dsn()]
            processes = [
                subprocess.Popen(
                    [*command, f"w{n}", str(appends)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
                for n in range(writers)
            ]
            for process in processes:
                assert process.stdout is not None
                process.stdout.readline()
            began = time.perf_counter()
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            for process in processes:
                process.communicate()
                if process.returncode:
                    raise RuntimeError(f"a writer ended with {process.returncode}")
            return writers * appends * BATCH_ROWS / (time.perf_counter() - began)

        yield compared(
            "sequencer_two_writers_vs_one",
            lambda: appended(2),
            lambda: appended(1),
            unit="rows/s",
            goal=">= 1.6",
            rows=appends * BATCH_ROWS,
            size_bytes=appends * BATCH_ROWS * ROW_BYTES,
            note=f"{appends} commits of {BATCH_ROWS} rows of {ROW_BYTES} random bytes by each process, with a draw from PostgreSQL a commit; ours are two processes on one"
            " stream, the peer is one; the server shares the machine's two cores with them",
        )


def main(log: str, address: str, name: str, appends: str) -> None:
    """Open, report that, wait for the word, append, and end."""
    with Catalog(address) as catalog:
        stream = catalog.resolve_stream(Path(log).name)
        writer = OneOfSeveral.open(
            catalog, stream, log, name=name, location=log, lease_s=5.0, options=LogOptions(disk_used_max=1.0)
        )
        rows = [os.urandom(ROW_BYTES) for _ in range(BATCH_ROWS)]
        plain = operation(rows)
        prepared = replace(plain, tables=tuple(replace(table, shard=writer.shards[0]) for table in plain.tables))
        writer.log.append(prepared)
        print("ready", flush=True)
        sys.stdin.readline()
        for _ in range(int(appends)):
            writer.log.append(prepared)
        writer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

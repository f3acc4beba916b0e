"""The requirements for racing calls of a catalog: one suite for all backends, with real processes and threads.

Subclass `CatalogRaces` as `millstream.testing.catalog.CatalogConformance`.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection as Pipe
from multiprocessing.synchronize import Barrier
from typing import Any, Final
from uuid import UUID

import pyarrow as pa
import pytest

from millstream.catalog import Catalog, CopyChunk, TableState
from millstream.errors import CatalogError, CursorExpired, StaleEpoch
from millstream.model.ids import ShardId, StreamId
from millstream.model.positions import Lsn, Seq
from millstream.model.schema import Column, TableSchema
from millstream.protocol.retention import CutOff, HolderKind
from millstream.testing.catalog import Place, WithCatalog, example_schema

__all__ = ["CatalogRaces"]

_PROCESSES: Final = 3
_THREADS: Final = 2
_RACERS: Final = _PROCESSES * _THREADS
_ROUNDS: Final = 12
_PATIENCE_S: Final = 120.0

Race = Callable[[Catalog, int, Callable[[], object]], Any]
"""One racer's work: gets the catalog, shared by the threads of its process; its number; a function that
waits for all others."""


def _work(pipe: Pipe, started: Barrier, rounds: Barrier) -> None:
    """Run one process of racers: run each race it is sent, until it is sent nothing."""

    def run(race: Race, catalog: Catalog, racer: int, answers: list[Any]) -> None:
        try:
            answers.append(race(catalog, racer, lambda: rounds.wait(_PATIENCE_S)))
        except Exception as error:  # noqa: BLE001 - the test reads it
            rounds.abort()
            answers.append(error)

    while (job := pipe.recv()) is not None:
        place, number, race = job
        answers: list[Any] = []
        started.wait(_PATIENCE_S)
        try:
            # All open it at once: the first race is about creating its tables.
            with Catalog(place) as catalog, ThreadPoolExecutor(_THREADS) as pool:
                for n in range(_THREADS):
                    pool.submit(run, race, catalog, number * _THREADS + n, answers)
        except Exception as error:  # noqa: BLE001 - as above
            rounds.abort()
            answers.append(error)
        pipe.send(answers)


class _Racers:
    """Processes with threads, kept for several races: starting them costs more than a race."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        # Kept: a semaphore that its maker drops is gone before the processes have found it.
        self._started, self._rounds = context.Barrier(_PROCESSES), context.Barrier(_RACERS)
        self._racers = []
        for _ in range(_PROCESSES):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, self._started, self._rounds), daemon=True)
            process.start()
            self._racers.append((ours, process))

    def run(self, place: Place, race: Race) -> list[Any]:
        """Return the racers' results, in no order; raises the error of one of them."""
        for number, (pipe, _) in enumerate(self._racers):
            pipe.send((place, number, race))
        answers: list[Any] = []
        for pipe, _ in self._racers:
            assert pipe.poll(_PATIENCE_S), "a racer hangs"
            answers += pipe.recv()
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        if errors:
            self._rounds.reset()
            # Racers that waited for a failed one only report that.
            raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
        return answers

    def close(self) -> None:
        """End the processes."""
        for pipe, process in self._racers:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(None)
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()


def _same_stream(catalog: Catalog, racer: int, wait: Callable[[], object]) -> list[str]:
    del racer
    told = []
    for number in range(_ROUNDS):
        wait()
        told.append(str(catalog.resolve_stream(f"shop{number}")))
    return told


def _own_log(catalog: Catalog, racer: int, wait: Callable[[], object]) -> list[str | None]:
    """Each racer comes with a log of its own, under one name."""
    told: list[str | None] = []
    for number in range(_ROUNDS):
        own = StreamId(UUID(int=(number + 1) * 100 + racer))
        wait()
        try:
            told.append(str(catalog.resolve_stream(f"log{number}", found=own)))
        except CatalogError:
            told.append(None)
    return told


def _register(catalog: Catalog, racer: int, wait: Callable[[], object]) -> list[tuple[int, int, int]]:
    """Every other round under a name of its own."""
    stream = catalog.resolve_stream("shop")
    told = []
    for number in range(_ROUNDS):
        wait()
        writer, epoch = catalog.register_writer(stream, "w" if number % 2 else f"w{number}.{racer}")
        told.append((number, int(writer), int(epoch)))
    return told


def _take_numbers(catalog: Catalog, racer: int, wait: Callable[[], object]) -> list[tuple[int, int]]:
    """As the embedded sequencer does: resume at the reservation's end, and hand out the reserved numbers first."""
    stream = catalog.resolve_stream("shop")
    reservations = catalog.reservations(stream)
    taken = []
    for number in range(_ROUNDS):
        wait()
        # One by one they fence each other, while earlier ones still reserve.
        _, epoch = catalog.register_writer(stream, "w")
        at = reservations.reserved()
        for _ in range(1 + (racer + number) % 4):
            try:
                reservations.reserve_to(Seq(at + 10), epoch=epoch)
            except StaleEpoch:
                break
            taken.append((int(at), int(at) + 10))
            at = Seq(at + 10)
    return taken


def _same_source_and_table(catalog: Catalog, racer: int, wait: Callable[[], object]) -> list[tuple[int, int]]:
    stream = catalog.resolve_stream("shop")
    told = []
    for number in range(_ROUNDS):
        wait()
        source = catalog.resolve_source(stream, 7, f"db{number}", 1)
        row = catalog.table_for(stream, source, 16400 + number, "public", f"orders_{racer % 2}")
        told.append((int(source), int(row.id)))
    return told


def _same_and_other_schemas(catalog: Catalog, racer: int, wait: Callable[[], object]) -> list[tuple[int, int]]:
    stream = catalog.resolve_stream("shop")
    source = catalog.resolve_source(stream, 7, "shop", 1)
    table = catalog.table_for(stream, source, 16400, "public", "orders").id
    told = []
    for number in range(_ROUNDS):
        wait()
        same = catalog.put_schema(stream, example_schema(table, source, "id", f"same{number}"))
        mine = catalog.put_schema(stream, example_schema(table, source, "id", f"of{racer}_{number}"))
        told.append((int(same.version), int(mine.version)))
    return told


def _grow_a_table(catalog: Catalog, racer: int, wait: Callable[[], object]) -> list[int]:
    stream = catalog.resolve_stream("shop")
    versions: list[int] = []

    def with_mine(newest: TableSchema) -> TableSchema:
        mine = Column(f"of{racer}_{len(versions)}", pa.int64())
        return replace(newest, columns=(*newest.columns, mine))

    for _ in range(_ROUNDS):
        wait()
        grown = catalog.application_table(stream, "public", "clicks", shard=ShardId(0), grow=with_mine)
        versions.append(int(grown.version))
    return versions


def _move_up(catalog: Catalog, racer: int, wait: Callable[[], object]) -> list[int]:
    stream = catalog.resolve_stream("shop")
    source = catalog.resolve_source(stream, 7, "shop", 1)
    stood = []
    wait()
    for number in range(_ROUNDS * 3):
        mine = number * _RACERS + racer
        stood.append(int(catalog.move_reached(source, Lsn(mine))))
        assert stood[-1] >= mine
        catalog.set_landed(stream, "lake", Seq(mine))
        assert catalog.landed(stream, "lake") >= mine
    return stood


def _cut_off_while_moving(catalog: Catalog, racer: int, wait: Callable[[], object]) -> int:
    """One racer cuts off, the others advance: the holder is either cut off at its old position, or has advanced."""
    stream = catalog.resolve_stream("shop")
    cut = 0
    for number in range(_ROUNDS):
        name = f"mail{number}"
        if racer == 0:
            catalog.set_needed_from(stream, name, Seq(5), kind=HolderKind.CONSUMER)
        wait()
        if racer == 0:
            cut += catalog.cut_off(stream, CutOff(name, HolderKind.CONSUMER, Seq(5), Seq(31)))
        else:
            for seq in (5, 6 + racer):
                try:
                    catalog.set_needed_from(stream, name, Seq(seq), kind=HolderKind.CONSUMER)
                except CursorExpired:
                    break
        wait()
        row = next(p for p in catalog.pipelines(stream) if p.name == name)
        assert row.cut_off_at is None or row.needed_from == 5, row
    return cut


def _compare_and_set(catalog: Catalog, racer: int, wait: Callable[[], object]) -> list[bool]:
    stream = catalog.resolve_stream("shop")
    source = catalog.resolve_source(stream, 7, "shop", 1)
    told = []
    for number in range(_ROUNDS):
        table = catalog.table_for(stream, source, 16400 + number, "public", f"t{number}").id
        wait()
        told.append(catalog.set_state(table, "copying", copy_id=f"c{racer}", only_from=[TableState.COPY_REQUESTED]))
        wait()
        assert catalog.table(table).copy_id.startswith("c")
    return told


def _chunks_in_any_order(catalog: Catalog, racer: int, wait: Callable[[], object]) -> None:
    stream = catalog.resolve_stream("shop")
    source = catalog.resolve_source(stream, 7, "shop", 1)
    table = catalog.table_for(stream, source, 16400, "public", "orders").id
    for number in range(_ROUNDS):
        wait()
        order = range(200) if racer % 2 else reversed(range(200))
        catalog.put_chunks([CopyChunk(table, "c", n, str(racer), str(number)) for n in order])
        catalog.put_fact("scope", "name", [racer, number])
    wait()
    assert len(catalog.chunks(table, "c")) == 200


class CatalogRaces(WithCatalog):
    """The requirements if several processes, of several threads each, do the same at once in a new catalog."""

    @pytest.fixture(scope="class")
    @classmethod
    def racers(cls) -> Iterator[_Racers]:
        """Yield the processes."""
        racers = _Racers()
        try:
            yield racers
        finally:
            racers.close()

    def test_a_stream_is_made_once(self, place: Place, racers: _Racers) -> None:
        """All get its one id. One of them creates the catalog itself."""
        found = racers.run(place, _same_stream)
        assert len(found) == _RACERS
        assert all(ids == found[0] for ids in found)
        assert len(set(found[0])) == _ROUNDS

    def test_of_several_logs_one_gets_the_name(self, place: Place, racers: _Racers) -> None:
        """The others get an error."""
        for told in zip(*racers.run(place, _own_log), strict=True):
            assert len([one for one in told if one is not None]) == 1

    def test_no_epoch_and_no_writer_id_is_given_twice(self, place: Place, racers: _Racers) -> None:
        """A name keeps its id."""
        found = [one for told in racers.run(place, _register) for one in told]
        assert sorted(epoch for _, _, epoch in found) == list(range(1, _RACERS * _ROUNDS + 1))
        shared = {writer for number, writer, _ in found if number % 2}
        own = [writer for number, writer, _ in found if not number % 2]
        assert len(shared) == 1
        assert sorted([*shared, *own]) == list(range(1, len(own) + 2))

    def test_no_number_is_reserved_for_two(self, place: Place, racers: _Racers) -> None:
        """A writer fenced in the middle reserves nothing that a newer one takes for free."""
        taken = sorted(block for blocks in racers.run(place, _take_numbers) for block in blocks)
        assert taken
        for (_, end), (start, _) in itertools.pairwise(taken):
            assert start >= end, taken

    def test_a_source_and_a_table_are_made_once(self, place: Place, racers: _Racers) -> None:
        """Also if they are renamed at the same time."""
        found = racers.run(place, _same_source_and_table)
        assert all(ids == found[0] for ids in found)
        with Catalog(place) as catalog:
            assert len(catalog.tables(catalog.stream("shop").id)) == _ROUNDS

    def test_a_schema_version_is_given_once(self, place: Place, racers: _Racers) -> None:
        """The same facts get the same version, others a number of their own, without gaps."""
        found = racers.run(place, _same_and_other_schemas)
        same = {versions[0] for told in found for versions in told}
        mine = [versions[1] for told in found for versions in told]
        assert len(same) == _ROUNDS
        assert sorted([*same, *mine]) == list(range(1, _ROUNDS * (_RACERS + 1) + 1))

    def test_a_table_that_applications_write_gets_every_column_that_any_of_them_brings(
        self, place: Place, racers: _Racers
    ) -> None:
        """It is made once: a version has all columns of earlier ones."""
        versions = [version for told in racers.run(place, _grow_a_table) for version in told]
        assert sorted(versions) == list(range(1, _RACERS * _ROUNDS + 1))
        with Catalog(place) as catalog:
            stream = catalog.stream("shop").id
            (newest,) = catalog.latest_schemas(stream).values()
            by_version = {schema.version: len(schema.columns) for schema in catalog.schemas(stream).values()}
        assert len({column.name for column in newest.columns}) == _RACERS * _ROUNDS
        assert all(count == version for version, count in by_version.items())

    def test_positions_only_grow(self, place: Place, racers: _Racers) -> None:
        """From any writer, and in any order."""
        for stood in racers.run(place, _move_up):
            assert stood == sorted(stood)
        with Catalog(place) as catalog:
            stream = catalog.stream("shop").id
            stands = int(catalog.sources(stream)[0].reached), int(catalog.landed(stream, "lake"))
        assert stands == (_ROUNDS * 3 * _RACERS - 1,) * 2

    def test_a_holder_is_cut_off_or_has_come_on(self, place: Place, racers: _Racers) -> None:
        """Never both: it would rely on dropped records."""
        racers.run(place, _cut_off_while_moving)

    def test_one_of_several_sets_a_state(self, place: Place, racers: _Racers) -> None:
        """The others get False."""
        for told in zip(*racers.run(place, _compare_and_set), strict=True):
            assert sum(told) == 1

    def test_nobody_waits_for_both_of_two_who_wait_for_him(self, place: Place, racers: _Racers) -> None:
        """Many rows in one call, in whatever order they were given."""
        racers.run(place, _chunks_in_any_order)

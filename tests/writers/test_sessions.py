"""An application's sessions: they number and resend writes on their own, and resume after a restart."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.app.homes import done, make_home, wait_for
from tests.writers.test_home_appender import process, writes

import millstream
import millstream.aio
from millstream.client.appends import AppendRequest
from millstream.client.write_session import Attempts, Numbers
from millstream.errors import (
    AppendOutcomeUnknown,
    BufferOutcomeUnknown,
    Fenced,
    IdempotencyKeyReused,
    InvalidValue,
    NotEnoughReplicas,
    Overloaded,
    PartialWrite,
    SessionExpired,
    SessionGap,
    UsageError,
    WriterClosed,
)
from millstream.model.ids import StreamId
from millstream.model.operations import Appended
from millstream.model.positions import Seq, SeqRange, StreamToken
from millstream.model.writes import SessionFacts
from millstream.protocol.deduplication.known_writes import AHEAD_MAX

WEB = '[streams.web]\n[streams.web.keys]\n"public.users" = ["id"]\n'


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return make_home(tmp_path / "web", WEB)


def ids_of(home: Path) -> list[int]:
    with millstream.open(home) as opened:
        return [row["id"] for batch in opened.read("web", table="users") for row in batch.to_pylist()]


def test_a_write_that_is_sent_again_is_told_what_it_got_the_first_time(home: Path) -> None:
    told: dict[str, Any] = {}
    for _ in range(3):
        with millstream.open(home) as opened:
            for name, how in (("s", {"session": "s", "number": 1}), ("k", {"idempotency_key": "k"})):
                for i in range(2):
                    found = opened.append("web", "users", [{"id": 1}, {"id": 2, "name": "x"}], **how)  # type: ignore[arg-type]
                    first = told.setdefault(name, found)
                    assert (found.seqs, found.offsets) == (first.seqs, first.offsets)
                    assert found.duplicate == (i > 0 or found is not first)
                with pytest.raises(IdempotencyKeyReused):
                    opened.append("web", "users", [{"id": 1}, {"id": 3}], **how)  # type: ignore[arg-type]
                with pytest.raises(IdempotencyKeyReused):
                    opened.append("web", "guests", [{"id": 1}, {"id": 2, "name": "x"}], **how)  # type: ignore[arg-type]
            # Columns added since, and others' rows, change nothing about it.
            opened.append("web", "users", {"id": 9, "other": 1.5})
    assert Counter(ids_of(home)) == {1: 2, 2: 2, 9: 3}


def test_the_same_rows_for_another_table_are_another_write(home: Path) -> None:
    """They were answered with the first table's positions, at which they weren't stored."""
    with millstream.open(home) as opened:
        session = opened.session("web", "s")
        for told in ({"idempotency_key": "k"}, {"session": "s", "number": 1}):
            opened.append("web", "users", {"id": 1}, **told)
            with pytest.raises(IdempotencyKeyReused):
                opened.append("web", "others", {"id": 1}, **told)
            assert opened.append("web", "public.users", {"id": 1}, **told).duplicate
        assert session.next_number == 2


def test_a_session_goes_on_where_it_was(home: Path) -> None:
    with millstream.open(home) as opened:
        session = opened.session("web", "app")
        assert session.next_number == 1
        for i in range(3):
            session.append("users", {"id": i})
        with pytest.raises(InvalidValue):
            session.append("users", {"id": "x"})
        assert session.next_number == 4
    with millstream.open(home) as opened:
        opened.append("web", "users", {"id": 5}, session="app", number=6)
        session = opened.session("web", "app")
        assert opened.session_facts("web", "app") == SessionFacts(3, (6,))
        assert session.next_number == 4
        for i in (3, 4, 6):
            session.append("users", {"id": i})
        assert opened.session_facts("web", "app") == SessionFacts(7)
        assert session.next_number == 8
        other = opened.session("web")
        assert other.name != opened.session("web").name
        other.append("users", {"id": 7})
        with pytest.raises(UsageError):
            opened.session("web", "x", next_number=0)
    assert sorted(ids_of(home)) == list(range(8))


def test_a_session_goes_on_where_it_was_for_tasks(home: Path) -> None:
    async def first() -> None:
        async with millstream.aio.open(home) as opened:
            session = opened.session("web", "app")
            with pytest.raises(UsageError):
                _ = session.next_number
            await asyncio.gather(*(session.append("users", {"id": i}) for i in range(50)))
            assert session.next_number == 51

    async def second() -> None:
        async with millstream.aio.open(home) as opened:
            session = opened.session("web", "app")
            assert await session.resume() == 51
            await session.append("users", {"id": 50})
            assert await opened.session_facts("web", "app") == SessionFacts(51)

    asyncio.run(first())
    asyncio.run(second())
    assert sorted(ids_of(home)) == list(range(51))


@pytest.mark.long
def test_a_hole_that_a_lost_write_left_is_filled_before_it_stops_the_session(home: Path) -> None:
    with millstream.open(home) as opened:
        session = opened.session("web", "app", next_number=1)
        with pytest.raises(KeyboardInterrupt), session._numbers.one(None):
            raise KeyboardInterrupt  # in the middle of a write that was never sent
        for i in range(AHEAD_MAX - 1):
            session.append("users", {"id": i})
        with pytest.raises(SessionGap):
            opened.append("web", "users", {"id": -1}, session="app", number=AHEAD_MAX + 1)
        session.append("users", {"id": AHEAD_MAX - 1})
        session.append("users", {"id": AHEAD_MAX})
        assert opened.session_facts("web", "app").mark == AHEAD_MAX + 1
    assert sorted(ids_of(home)) == list(range(AHEAD_MAX + 1))


def test_sessions_are_forgotten_as_configured(home: Path) -> None:
    make_home(home, WEB + "[streams.web.ingest]\nsessions_max = 1\nidempotency_keys_max = 1\n")
    with millstream.open(home) as opened:
        for name in ("a", "b"):
            opened.append("web", "users", {"id": 1}, session=name, number=1)
        with pytest.raises(SessionExpired):
            opened.append("web", "users", {"id": 1}, session="a", number=1)
        with pytest.raises(SessionExpired):
            opened.session("web", "a").append("users", {"id": 1})
    assert ids_of(home) == [1, 1]


DONE = Appended(StreamToken.scalar(StreamId(uuid.UUID(int=1)), Seq(1)), SeqRange(Seq(1), 1), {})


class Unreliable:
    """A home whose appends fail, in turn, as prepared."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.asked: list[int | None] = []

    def append(self, request: AppendRequest, _tables: Mapping[str, pa.Table]) -> Appended:
        self.asked.append(request.number)
        if self.failures:
            raise self.failures.pop(0)
        return DONE

    def session_facts(self, _stream: str, _name: str) -> SessionFacts:
        return SessionFacts(0)


@contextmanager
def session_of(*failures: Exception) -> Iterator[tuple[millstream.Session, Unreliable]]:
    home = Unreliable(*failures)
    yield millstream.Session(home.append, home.session_facts, "web", "s", None), home


def test_what_may_be_sent_again_is_under_its_own_number() -> None:
    with session_of(AppendOutcomeUnknown("?"), WriterClosed("gone"), Overloaded("busy")) as (session, home):
        assert session.append("t", {"x": 1}, deadline_s=20) == DONE
        assert home.asked == [1, 1, 1, 1]
        assert session.next_number == 2
    with session_of(AppendOutcomeUnknown("?"), InvalidValue("no")) as (session, home):
        with pytest.raises(AppendOutcomeUnknown) as unknown:  # it may be there from the first try
            session.append("t", {"x": 1}, deadline_s=20)
        assert unknown.value.details["number"] == 1
        assert session.next_number == 2
        session.append("t", {"x": 1}, number=1)
        assert home.asked == [1, 1, 1]
    with session_of(WriterClosed("gone"), InvalidValue("no")) as (session, home):
        with pytest.raises(InvalidValue):
            session.append("t", {"x": 1}, deadline_s=20)
        assert session.next_number == 1
    with session_of(AppendOutcomeUnknown("?")) as (session, home), pytest.raises(AppendOutcomeUnknown):
        session.append("t", {"x": 1}, deadline_s=0.0)
    with session_of(IdempotencyKeyReused("other's")) as (session, home):
        with pytest.raises(IdempotencyKeyReused):
            session.append("t", {"x": 1})
        assert session.next_number == 2


@pytest.mark.parametrize(
    "error",
    [
        AppendOutcomeUnknown("?"),
        BufferOutcomeUnknown("?"),
        PartialWrite("the log took it"),
        RuntimeError("our bug"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_number_of_a_write_that_may_be_there_is_no_other_writes(error: BaseException) -> None:
    """The next write got it: other rows were refused, and equal rows were taken for a repeat of the first."""
    numbers = Numbers("s", 1)
    with pytest.raises(type(error)), numbers.one(None) as first:
        raise error
    with pytest.raises(InvalidValue), numbers.one(None) as second:
        raise InvalidValue("refused")
    with numbers.one(None) as third:
        assert (first, second, third) == (1, 2, 2)
    assert not numbers.fill(SessionFacts(2))
    with pytest.raises(type(error)), numbers.one(None) as fourth:
        raise error
    assert numbers.fill(SessionFacts(2))
    assert numbers.next == fourth


def test_numbers_of_many_threads_have_no_holes_and_none_twice() -> None:
    numbers = Numbers("s", 1)
    used: list[int] = []

    def work(seed: int) -> None:
        for i in range(200):
            try:
                with numbers.one(None) as number:
                    if (seed + i) % 7 == 0:
                        raise InvalidValue("refused")
                    used.append(number)
            except InvalidValue:
                continue

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(used) == len(set(used))
    assert sorted({*used, *range(numbers.next, numbers.next)}) == sorted(used)
    assert max(used) - len(used) <= 4
    assert Attempts(5.0).left_s > 4.0


def test_a_write_that_is_durable_somewhere_keeps_its_number_whatever_is_said_of_it_later() -> None:
    """It was resent to a node that no longer led, whose refusal freed the number for the next write."""
    numbers, attempts = Numbers("s", 1), Attempts(60.0)

    def write() -> None:
        with numbers.one(None) as number:
            for said in (NotEnoughReplicas("nobody has it"), Fenced("another node leads")):
                attempts.nap_after(said, number)

    with pytest.raises(NotEnoughReplicas) as told:
        write()
    assert told.value.details["number"] == 1
    assert isinstance(told.value.__cause__, Fenced)
    assert numbers.next == 2


@pytest.mark.sampled
@pytest.mark.parametrize("point", ["wal.before_fsync:9", "wal.after_fsync:9", "wal.before_session_copy:2", ""])
def test_what_is_retried_by_session_is_there_once_however_often_the_writer_is_killed(home: Path, point: str) -> None:
    """Threads append through a writer process that is killed under them, at any moment or at a failpoint."""
    stop = threading.Event()
    acknowledged: dict[str, list[tuple[int, int]]] = {}

    def work(opened: millstream.OpenHome, name: str) -> None:
        session = opened.session("web", name)
        mine = acknowledged.setdefault(name, [])
        number = 0
        while not stop.is_set():
            number += 1
            told = session.append("users", [{"id": number, "who": name}] * 2, deadline_s=60)
            assert told.row_count == 2
            mine.append((number, int(told.seqs.first)))

    def acknowledged_count() -> int:
        return sum(map(len, acknowledged.values()))

    with millstream.open(home) as opened, ThreadPoolExecutor(4) as pool:
        running: list[Any] = []
        try:
            for round_ in range(3):
                with process(home, "capture", "run", **({"MILLSTREAM_FAILPOINTS": point} if point else {})) as writer:
                    if not running:
                        wait_for(lambda: writes(home, writer.pid))
                        running = [pool.submit(work, opened, name) for name in ("a", "b", "c")]
                    before = acknowledged_count()
                    wait_for(lambda: writer.poll() is not None or acknowledged_count() > before + 30)  # noqa: B023
                    if writer.poll() is None:
                        os.kill(writer.pid, signal.SIGKILL)
                    writer.wait()
                assert round_ >= 0
            before = acknowledged_count()
            wait_for(lambda: acknowledged_count() > before + 10)
        finally:
            stop.set()
        for one in running:
            one.result(timeout=300)
    with millstream.open(home) as opened:
        rows = [row for batch in opened.read("web", table="users") for row in batch.to_pylist()]
    found: dict[tuple[str, int], list[int]] = {}
    for row in rows:
        found.setdefault((row["who"], row["id"]), []).append(row["__seq"])
    for name, told in acknowledged.items():
        assert [number for number, _ in told] == list(range(1, len(told) + 1))
        for number, first in told:
            assert sorted(found.pop((name, number))) == [first, first + 1], (name, number)
    assert found == {}


def test_sessions_travel_with_an_exported_log(home: Path, tmp_path: Path) -> None:
    with millstream.open(home) as opened:
        for number in (1, 2, 4):
            opened.append("web", "users", [{"id": number}, {"id": 10 + number}], session="app", number=number)
        opened.append("web", "users", {"id": 3}, idempotency_key="k")
    done(home, "wal", "export", "--format", "arrow", "-o", str(tmp_path / "out"))
    other = make_home(tmp_path / "other", WEB)
    done(other, "wal", "import", str(tmp_path / "out"))
    with millstream.open(other) as opened:
        assert opened.session_facts("web", "app") == SessionFacts(2, (4,))
        for number in (1, 2, 4):
            told = opened.append("web", "users", [{"id": number}, {"id": 10 + number}], session="app", number=number)
            assert told.duplicate
            found = [row["id"] for batch in opened.read("web", upto=told.token) for row in batch.to_pylist()]
            assert found[-2:] == [number, 10 + number]
        assert opened.append("web", "users", {"id": 3}, idempotency_key="k").duplicate
        assert not opened.append("web", "users", {"id": 5}, session="app", number=3).duplicate
    assert ids_of(other) == [1, 11, 2, 12, 4, 14, 3, 5]

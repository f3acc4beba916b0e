"""Several writers of one stream on a real PostgreSQL, killed, stopped, continued: readers see a consistent stream."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import UUID

import pytest
from tests.app.homes import config, done, make_home, run, wait_for
from tests.catalog.sequencing import UnreliableAnnouncements
from tests.commands import Command
from tests.seeds import Seeds
from tests.wal.plain_operations import plain_ops, plain_spilled, plain_table
from tests.writers.writer_process import ROWS

from millstream.administration.doctor import examine
from millstream.catalog import Catalog
from millstream.catalog.database import CatalogDatabase
from millstream.catalog.shared_sequence import PostgresSequenceStore
from millstream.catalog.writer_notifications import PostgresAnnouncements
from millstream.errors import CatalogError, LogError, SequencingError
from millstream.home.home import Home
from millstream.model.ids import StreamId
from millstream.model.operations import TableRows
from millstream.model.positions import Seq, StreamToken
from millstream.ports import Announcements
from millstream.protocol.sequencer import Announcement
from millstream.testing import EmbeddedPostgres
from millstream.testing.errors import coded
from millstream.testing.pytest_plugin import Database
from millstream.wal.mending.inspect import verify
from millstream.wal.reader import StreamReader
from millstream.writers import leased_writer as writers
from millstream.writers.leased_writer import OneOfSeveral

pytestmark = pytest.mark.siege

STREAM = StreamId(UUID(int=11))
LEASE_S = 2.0
ENOUGH_WITHIN_S = 300.0
"""How much longer than asked for a siege may take on a machine that others use."""
MAY_FAIL = {"stale_epoch", "shard_locked", "lease_too_short", "catalog", "catalog_busy", "catalog_unreachable"}
"""Errors of a start: another process took its name, the server crashed, or it was stopped while it read the time."""


class Writer:
    """A writer's process."""

    def __init__(self, folder: Path, address: str, name: str, failpoint: str = "") -> None:
        environ = {**os.environ, "MILLSTREAM_FAILPOINTS": failpoint}
        self.name = name
        self.process = Command(
            [str(folder), address, name, str(LEASE_S)], stdout=subprocess.PIPE, text=True, env=environ,
            begins="tests.writers.writer_process:main",
        )  # fmt: skip
        self.said: list[list[str]] = []
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n") and line.split():
                self.said.append(line.split())

    def acknowledged(self) -> dict[str, int]:
        return {words[1]: int(words[2]) for words in list(self.said) if words[0] == "ack"}

    def texts(self, word: str) -> set[str]:
        return {words[1] for words in list(self.said) if words[0] == word}

    def send(self, number: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    def end(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        self._thread.join()


class Reader:
    """A linear reader that runs with the writers: it checks the order as it goes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stop = threading.Event()
        self.upto = Seq(0)
        self.seen: dict[int, str] = {}
        self.token: StreamToken | None = None
        self.heard: dict[int, str] = {}
        """Operations that a vector reader has read."""
        self.wrong: list[str] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            try:
                self.read()
            except Exception as error:  # noqa: BLE001 - told at the end
                if isinstance(error, LogError) and error.code == "log_empty":
                    continue
                self.wrong.append(repr(error))
                return

    def read(self) -> None:
        reader = StreamReader(str(self._folder))
        cut = reader.persisted_upto()
        if cut < self.upto:
            self.wrong.append(f"persisted_upto went from {self.upto} back to {cut}")
        last = int(self.upto)
        for records in reader.read_between(self.upto, cut):
            seqs, texts = records.batch.column("__seq").to_pylist(), records.batch.column("text").to_pylist()
            for seq, text in zip(seqs, texts, strict=True):
                if seq in self.seen or not self.upto < seq <= cut:
                    self.wrong.append(f"{seq} ({text}) came in ({self.upto}, {cut}], after {last}")
                self.seen[seq] = text
                last = seq
        self.upto = cut
        token = reader.vector_token()
        before = StreamToken(token.stream, Seq(0)) if self.token is None else self.token
        if not before <= token:
            self.wrong.append(f"{token} isn't behind {before}")
        for records in reader.read_tokens(before, token):
            seqs, texts = records.batch.column("__seq").to_pylist(), records.batch.column("text").to_pylist()
            if self.heard.keys() & set(seqs):
                self.wrong.append(f"a vector reader saw some of {seqs} twice")
            self.heard |= zip(seqs, texts, strict=True)
        self.token = token
        if not self.seen.items() <= self.heard.items():
            self.wrong.append("a linear reader knew more than a vector reader")

    def end(self) -> None:
        self._stop.set()
        self._thread.join()


def check(folder: Path, reader: Reader, writers: list[Writer]) -> None:
    """Check that acknowledged operations are at their numbers, complete, once, in order, and refused ones absent."""
    assert not reader.wrong, reader.wrong
    by_text: dict[str, list[int]] = {}
    for seq, text in reader.seen.items():
        by_text.setdefault(text, []).append(seq)
    assert all(len(seqs) == ROWS for seqs in by_text.values()), "an operation is there in part, or twice"
    for writer in writers:
        acknowledged = writer.acknowledged()
        lost = {text for text, seq in acknowledged.items() if min(by_text.get(text, [0])) != seq}
        assert not lost, (writer.name, sorted(lost)[:5])
        assert not writer.texts("refused") & by_text.keys()
        failures = [words for words in writer.said if words[0] == "failed" and words[1] not in MAY_FAIL]
        assert not failures, failures
        own = [min(by_text[text]) for text in acknowledged]
        assert own == sorted(own)
    tried = set[str]().union(*(writer.texts("try") for writer in writers))
    assert by_text.keys() <= tried
    fresh = StreamReader(str(folder))
    again = {
        seq
        for records in fresh.read_between(Seq(0), fresh.persisted_upto())
        for seq in records.batch.column("__seq").to_pylist()
    }
    assert again == reader.seen.keys() == reader.heard.keys()
    assert verify(str(folder)).is_whole


@dataclass
class Siege:
    """Writers, each of which is killed, stopped and restarted at random."""

    folder: Path
    server: EmbeddedPostgres
    address: str
    chance: random.Random
    all: list[Writer] = field(default_factory=list)
    running: dict[str, Writer] = field(default_factory=dict)
    halted: dict[str, float] = field(default_factory=dict)
    """Time at which each stopped writer continues."""
    happened: Counter[str] = field(default_factory=Counter)

    def start(self, name: str, *, in_peace: bool = False) -> None:
        points = (
            [""]
            if in_peace
            else [
                "",
                "",
                "wal.before_fsync:9:stop",
                "wal.after_fsync:9:stop",
                "wal.after_fsync:15",
                "wal.before_fsync:20",
            ]
        )
        self.running[name] = Writer(self.folder, self.address, name, self.chance.choice(points))
        self.all.append(self.running[name])

    def outcomes(self) -> Counter[str]:
        """Return the writers' answers so far."""
        return Counter(words[0] for writer in self.all for words in list(writer.said))

    def turn(self) -> None:
        """Do one random thing to one of them."""
        name = self.chance.choice(list(self.running))
        writer = self.running[name]
        now = time.monotonic()
        what = self.chance.choice(["kill", "halt", "halt", "twice", "nothing"])
        if writer.process.poll() is not None:
            what = "start"
            self.start(name)
        elif what == "kill":
            writer.end()
        elif what == "halt":
            writer.send(signal.SIGSTOP)
            self.halted[name] = now + self.chance.choice([0.3, LEASE_S + 1, 3 * LEASE_S])
        elif what == "twice":
            # Start a second process under its name while the old one hangs; the old one wakes up later.
            writer.send(signal.SIGSTOP)
            self.start(name)
        self.happened[what] += 1
        for other, until in list(self.halted.items()):
            if now > until:
                del self.halted[other]
        for one in self.all:
            if one.name not in self.halted and self.chance.random() < 0.3:
                one.send(signal.SIGCONT)


WRITER = '[writer]\nname = "writer"\nlease = "2s"\n'


@pytest.fixture
def home(tmp_path: Path, postgres: Database) -> Path:
    """A home that captures a database, with its catalog in it, and that has one writer so far."""
    with postgres.connect() as connection:
        connection.execute("CREATE TABLE orders (id bigint PRIMARY KEY)")
        connection.execute("INSERT INTO orders SELECT generate_series(1, 5)")
    home = make_home(tmp_path / "shop", config(postgres.dsn, postgres.dsn, tables='["public.*"]'))
    done(home, "capture", "run", "--until-caught-up")
    return home


def second_writer(
    home: Path,
    dsn: str,
    *,
    name: str = "second",
    lease_s: float = LEASE_S,
    announcements: Announcements | None = None,
) -> OneOfSeveral:
    place = Home(home)
    catalog = Catalog(dsn)
    return OneOfSeveral.open(
        catalog,
        catalog.stream("shop").id,
        str(place.wal_folder("shop")),
        name=name,
        location=place.identity().id,
        lease_s=lease_s,
        announcements=announcements,
    )


def append(writer: OneOfSeveral, number: int) -> Seq:
    ops = plain_ops({number: [(plain_table(900), 1, "from the second")]}, shard_of={900: writer.shards[0]})
    return writer.log.append(ops).seqs.first


def states(home: Path) -> dict[str, str]:
    return {one["name"]: one["state"] for one in json.loads(done(home, "writers", "ls", "--json"))["writers"]}


def test_a_stream_that_one_writer_owned_goes_on_as_one_of_several(home: Path, postgres: Database) -> None:
    assert states(home) == {}
    assert "which owns it" in run(home, "writers").stderr
    with pytest.raises(LogError, check=coded("shard_taken"), match="belongs to a single writer"):
        second_writer(home, postgres.dsn)
    (home / "millstream.toml").write_text(WRITER + (home / "millstream.toml").read_text())
    with postgres.connect() as connection:
        connection.execute("INSERT INTO orders VALUES (6)")
    assert states(home) == {}
    done(home, "capture", "run", "--until-caught-up")
    assert states(home) == {"writer": "stopped"}
    second = second_writer(home, postgres.dsn)
    append(second, 1)
    with postgres.connect() as connection:
        connection.execute("INSERT INTO orders VALUES (7)")
    done(home, "capture", "run", "--until-caught-up")
    append(second, 2)
    assert states(home) == {"writer": "stopped", "second": "alive"}
    rows = [json.loads(line) for line in done(home, "wal", "cat").splitlines()]
    assert [row["row"]["id"] for row in rows if row["table"] == "public.orders"] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["seq"] for row in rows] == sorted(row["seq"] for row in rows)
    assert sum(row["table"] == "public.table900" for row in rows) == 2
    second.close()
    assert states(home) == {"writer": "stopped", "second": "stopped"}
    status = json.loads(done(home, "status", "--json"))["streams"][0]
    assert [one["behind"] for one in status["writers"]] == [0, 0]
    assert "writers: writer stopped, second stopped" in done(home, "status")


def test_who_gives_no_name_is_told_of_those_who_do(home: Path) -> None:
    plain = (home / "millstream.toml").read_text()
    (home / "millstream.toml").write_text(WRITER + plain)
    done(home, "capture", "run", "--until-caught-up")
    (home / "millstream.toml").write_text(plain)
    refused = run(home, "capture", "run", "--until-caught-up")
    assert refused.returncode == 2
    assert "names (writer)" in refused.stderr
    assert "[writer] name" in refused.stderr


def test_capture_stays_with_the_writer_that_has_it(home: Path, postgres: Database) -> None:
    plain = (home / "millstream.toml").read_text()
    done(home, "capture", "run", "--until-caught-up")
    other = {"MILLSTREAM_WRITER__NAME": "other"}
    refused = run(home, "capture", "run", "--until-caught-up", **other)
    assert refused.returncode == 1
    assert "belongs to a single writer" in refused.stderr
    assert states(home) == {}  # nothing was registered: the one writer goes on
    done(home, "capture", "run", "--until-caught-up")
    (home / "millstream.toml").write_text(WRITER + plain)
    done(home, "capture", "run", "--until-caught-up")
    with postgres.connect() as connection:
        connection.execute("INSERT INTO orders VALUES (6)")
    refused = run(home, "capture", "run", "--until-caught-up", **other)
    assert refused.returncode == 2
    assert "is captured by its writer writer" in refused.stderr
    assert "MILLSTREAM_WRITER__NAME" in refused.stderr
    done(home, "capture", "run", "--until-caught-up")
    rows = [json.loads(line) for line in done(home, "wal", "cat").splitlines()]
    assert [row["row"]["id"] for row in rows if row["table"] == "public.orders"] == [1, 2, 3, 4, 5, 6]
    assert states(home) == {"writer": "stopped"}


def test_a_name_needs_a_catalog_that_can_be_shared(tmp_path: Path, postgres: Database) -> None:
    home = make_home(tmp_path / "shop", WRITER + config(postgres.dsn, None, tables='["public.*"]'))
    refused = run(home, "capture", "run", "--until-caught-up")
    assert refused.returncode == 2
    assert "catalog move" in refused.stderr


def test_a_lease_that_is_shorter_than_the_way_to_the_catalog(home: Path, postgres: Database) -> None:
    (home / "millstream.toml").write_text(WRITER + (home / "millstream.toml").read_text())
    done(home, "capture", "run", "--until-caught-up")
    with pytest.raises(SequencingError, check=coded("lease_too_short")) as caught:
        second_writer(home, postgres.dsn, lease_s=0.000_01)
    assert caught.value.details["lease_s"] == 0.000_01


def test_doctor_looks_at_what_a_writer_needs(home: Path, postgres: Database) -> None:
    def found() -> tuple[str, str]:
        of = [one for one in examine(Home(home), lambda _: None) if one.check == "writers of shop"]
        return of[0].code, of[0].message + of[0].fix

    assert found()[0] == "ok"  # no catalog yet
    plain = (home / "millstream.toml").read_text()
    done(home, "capture", "run", "--until-caught-up")
    assert found() == ("ok", "one, which owns it")
    (home / "millstream.toml").write_text(WRITER + plain)
    done(home, "capture", "run", "--until-caught-up")
    code, text = found()
    assert (code, "the lease is 2 s" in text) == ("ok", True)
    (home / "millstream.toml").write_text(plain)
    assert found()[0] == "config"
    (home / "millstream.toml").write_text(WRITER.replace('"writer"', '"other"') + plain)
    assert found()[0] == "config"
    (home / "millstream.toml").write_text(WRITER + plain)
    with Catalog(postgres.dsn) as catalog:
        name = f"millstream.numbers_{catalog.stream('shop').id.hex}"
    with postgres.connect() as connection:
        connection.execute(f"ALTER SEQUENCE {name} CACHE 10 CYCLE")
    code, text = found()
    assert code == "sequence_unusable"
    assert f"ALTER SEQUENCE {name}" in text


def test_an_idle_writer_lets_readers_pass_as_soon_as_it_hears(
    home: Path, postgres: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The periodic advance is switched off, so only an announcement can do it.
    monkeypatch.setattr(writers, "FOLLOW_EVERY_S", 3600.0)
    (home / "millstream.toml").write_text(WRITER + (home / "millstream.toml").read_text())
    done(home, "capture", "run", "--until-caught-up")
    with (
        Catalog(postgres.dsn) as catalog,
        second_writer(home, postgres.dsn, lease_s=14_400) as busy,
        second_writer(
            home, postgres.dsn, name="third", lease_s=14_400,
            announcements=(listening := Listening(catalog.database, catalog.stream("shop").id)),
        ),
    ):  # fmt: skip
        assert listening.began.wait(60.0)  # an announcement made before the writer listens is lost
        reader = StreamReader(str(Home(home).wal_folder("shop")))
        for number in range(1, 4):
            last = append(busy, number)
            wait_for(lambda last=last: reader.persisted_upto() >= last)


def test_an_idle_writer_that_hears_nothing_lets_readers_pass_at_its_turn(home: Path, postgres: Database) -> None:
    (home / "millstream.toml").write_text(WRITER + (home / "millstream.toml").read_text())
    done(home, "capture", "run", "--until-caught-up")
    with Catalog(postgres.dsn) as catalog:
        wire = PostgresAnnouncements(catalog.database, catalog.stream("shop").id)
        deaf = UnreliableAnnouncements(wire, random.Random(0), lost=1.0)
        with (
            second_writer(home, postgres.dsn) as busy,
            second_writer(home, postgres.dsn, name="third", announcements=deaf),
        ):
            reader = StreamReader(str(Home(home).wal_folder("shop")))
            last = append(busy, 1)
            wait_for(lambda: reader.persisted_upto() >= last)


def test_a_writer_that_died_is_recovered_by_another_within_its_lease(home: Path, postgres: Database) -> None:
    (home / "millstream.toml").write_text(WRITER + (home / "millstream.toml").read_text())
    capture = Command(["--home", str(home), "capture", "run"], stdin=subprocess.DEVNULL)
    second = None
    try:
        wait_for(lambda: states(home).get("writer") == "alive")
        second = second_writer(home, postgres.dsn)
        capture.kill()
        capture.wait()
        last = append(second, 1)
        reader = StreamReader(str(Home(home).wal_folder("shop")))
        wait_for(lambda: reader.persisted_upto() >= last)
        wait_for(lambda: states(home) == {"writer": "stopped", "second": "alive"}, what=lambda: states(home))
    finally:
        capture.kill()
        capture.wait()
        if second is not None:
            second.close()


def test_a_writer_whose_log_is_elsewhere_is_waited_for_until_it_is_forgotten(home: Path, postgres: Database) -> None:
    (home / "millstream.toml").write_text(WRITER + (home / "millstream.toml").read_text())
    done(home, "capture", "run", "--until-caught-up")
    with Catalog(postgres.dsn) as catalog:
        store = PostgresSequenceStore(catalog.database, catalog.stream("shop").id, lease_s=3600)
        far = store.register("far", "another machine")
        store.recovered(far.writer, far.epoch)
        given = store.draw(far.writer, far.epoch, 3, position=Seq(0)).given
        store.close()
    alive = run(home, "writers", "forget", "far", "--yes")
    assert alive.returncode == 1
    assert "its lease runs" in alive.stderr
    second = second_writer(home, postgres.dsn)
    last = append(second, 1)
    assert last > given.last
    with postgres.connect() as connection:
        connection.execute("UPDATE millstream.writers SET lease_until_us = 0 WHERE name = 'far'")
    wait_for(lambda: states(home)["far"] == "expired")
    reader = StreamReader(str(Home(home).wal_folder("shop")))
    assert reader.persisted_upto() < given.first
    assert f"millstream --home {home} writers forget" in done(home, "status")
    unknown = run(home, "writers", "forget", "fra")  # regression: it asked for confirmation before it looked
    assert unknown.returncode == 2
    assert "far" in unknown.stderr
    done(home, "writers", "forget", "far", "--yes")
    wait_for(lambda: reader.persisted_upto() >= last)
    assert states(home)["far"] == "forgotten"
    second.close()
    wait_for(lambda: states(home)["second"] == "stopped")
    for name, what in (("far", "been forgotten"), ("second", "stopped")):
        again = run(home, "writers", "forget", name)
        assert f"writer {name} has {what}" in again.stderr
        assert "there is nothing to forget" in again.stderr
        assert f"hint: Run `millstream --home {home} writers`" in again.stderr


def test_a_writer_whose_log_is_here_is_recovered_and_not_forgotten(home: Path, postgres: Database) -> None:
    (home / "millstream.toml").write_text(WRITER + (home / "millstream.toml").read_text())
    done(home, "capture", "run", "--until-caught-up")
    capture = Command(["--home", str(home), "capture", "run"], stdin=subprocess.DEVNULL)
    reader = StreamReader(str(Home(home).wal_folder("shop")))
    try:
        wait_for(lambda: states(home).get("writer") == "alive")
        before = reader.persisted_upto()
        with postgres.connect() as connection:
            connection.execute("INSERT INTO orders VALUES (101)")
        wait_for(lambda: reader.persisted_upto() > before)
    finally:
        capture.kill()
        capture.wait()
    seen = reader.persisted_upto()
    wait_for(lambda: states(home).get("writer") == "expired")
    told = run(home, "writers", "forget", "writer", "--yes")
    assert (told.returncode, "recovered the records of writer" in told.stderr) == (0, True)
    assert states(home) == {"writer": "stopped"}
    assert reader.persisted_upto() >= seen
    done(home, "capture", "run", "--until-caught-up")
    rows = [json.loads(line) for line in done(home, "wal", "cat").splitlines()]
    assert [row["row"]["id"] for row in rows if row["table"] == "public.orders"] == [1, 2, 3, 4, 5, 101]


def test_a_group_that_takes_longer_than_the_lease_is_nobodys_to_take_over(home: Path, postgres: Database) -> None:
    (home / "millstream.toml").write_text(WRITER + (home / "millstream.toml").read_text())
    done(home, "capture", "run", "--until-caught-up")
    with second_writer(home, postgres.dsn) as long, second_writer(home, postgres.dsn, name="third") as other:
        table = plain_table(900)
        whole = plain_spilled(1, [[(table, 2, "slow")] for _ in range(10)], shard_of={900: long.shards[0]})

        def chunks() -> Iterator[tuple[TableRows, ...]]:
            for chunk in whole.chunks():
                time.sleep(LEASE_S / 4)
                yield chunk

        last = long.log.append(replace(whole, chunks=chunks)).seqs.last
        append(other, 2)
        reader = StreamReader(str(Home(home).wal_folder("shop")))
        wait_for(lambda: reader.persisted_upto() > last)
        assert long.log.failure() is None


def test_a_catalog_that_was_away_for_longer_than_a_lease_makes_nobody_take_the_others_for_dead(
    tmp_path: Path, server: EmbeddedPostgres
) -> None:
    with Catalog(server.dsn()) as catalog, ExitStack() as stack:
        stream = catalog.resolve_stream("shop")
        writers = [
            stack.enter_context(
                OneOfSeveral.open(
                    catalog, stream, str(tmp_path / "wal"), name=name, location="here", lease_s=2.0, shard_count=1
                )
            )
            for name in "abc"
        ]
        numbers = [append(writer, number) for number, writer in enumerate(writers, 1)]
        server.stop("fast")
        time.sleep(4.0)
        server.start()
        again = []
        for number, writer in enumerate(writers, 4):
            wait_for(lambda number=number, writer=writer: _appended(writer, number, again))
        reader = StreamReader(str(tmp_path / "wal"))
        wait_for(lambda: reader.persisted_upto() >= max(again))
        found = [
            seq for records in reader.read_between(Seq(0), max(again)) for seq in records.batch["__seq"].to_pylist()
        ]
        assert found == sorted({*numbers, *again})
        assert [writer.log.failure() for writer in writers] == [None, None, None]


def test_a_server_that_leaves_a_call_unanswered_holds_up_no_sign_of_life(
    tmp_path: Path, server: EmbeddedPostgres
) -> None:
    with Catalog(server.dsn()) as catalog, ExitStack() as stack:
        stream = catalog.resolve_stream("shop")
        first, second = (
            stack.enter_context(
                OneOfSeveral.open(
                    catalog, stream, str(tmp_path / "wal"), name=name, location="here", lease_s=2.0, shard_count=1
                )
            )
            for name in "ab"
        )
        append(first, 1)
        with server.connect() as connection:
            called = "query LIKE 'LISTEN%' OR query LIKE '%pg_notify(%'"
            query = f"SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND ({called})"
            wait_for(lambda: len(connection.execute(query).fetchall()) == 2)
            halted = [pid for (pid,) in connection.execute(query)]
        for pid in halted:
            os.kill(pid, signal.SIGSTOP)
        try:
            append(first, 2)
            time.sleep(4.0)
            last = append(second, 3)
            reader = StreamReader(str(tmp_path / "wal"))
            wait_for(lambda: reader.persisted_upto() >= last)
            assert (first.log.failure(), second.log.failure()) == (None, None)
        finally:
            for pid in halted:
                os.kill(pid, signal.SIGCONT)


class Listening(PostgresAnnouncements):
    """Announcements that report when they have begun to listen."""

    def __init__(self, database: CatalogDatabase, stream: StreamId) -> None:
        super().__init__(database, stream)
        self.began = threading.Event()

    def hear(self, timeout_s: float) -> list[Announcement]:
        heard = super().hear(timeout_s)
        if self._connection is not None:
            self.began.set()
        return heard


def _appended(writer: OneOfSeveral, number: int, numbers: list[Seq]) -> bool:
    with suppress(CatalogError):
        numbers.append(append(writer, number))
        return True
    return False


@pytest.fixture
def server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres() as server:  # with fsync: it is crashed
        yield server


def besiege(
    tmp_path: Path,
    server: EmbeddedPostgres,
    *,
    seed: int,
    seconds: float,
    writers: int = 8,
    is_enough: Callable[[Siege], object] = lambda _: True,
) -> Siege:
    """Run for so many seconds, and longer until enough has happened."""
    siege = Siege(tmp_path / "wal", server, server.dsn(), random.Random(seed))
    with Catalog(siege.address):
        pass  # made once, before they all come
    names = [f"w{number}" for number in range(writers)]
    for name in names:
        siege.start(name)
    reader = Reader(siege.folder)
    try:
        end = time.monotonic() + seconds
        crashes = [time.monotonic() + seconds * share for share in (0.35, 0.7)]
        while time.monotonic() < end or crashes or not is_enough(siege):
            assert time.monotonic() < end + ENOUGH_WITHIN_S, (siege.happened, siege.outcomes())
            time.sleep(0.25)
            siege.turn()
            if crashes and time.monotonic() > crashes[0]:
                crashes.pop(0)
                server.stop("immediate")
                server.start()
                siege.happened["crash"] += 1
        for writer in siege.all:
            writer.end()
        # The writer that comes back recovers what all of them left.
        siege.start(names[0], in_peace=True)
        store = PostgresSequenceStore(Catalog(siege.address).database, STREAM)
        wait_for(
            lambda: sum(entry.phase.value != "settled" for entry in store.writers()) == 1,
            what=lambda: (store.writers(), siege.running[names[0]].said[-3:]),
        )
        siege.running[names[0]].end()
        with Catalog(siege.address) as catalog:
            OneOfSeveral.open(
                catalog, STREAM, str(siege.folder), name=names[0], location="here", lease_s=LEASE_S, shard_count=2
            ).close()
        newest = store.view().newest
        store.close()
        reader.end()
        reader.read()
        assert reader.upto == newest
        check(siege.folder, reader, siege.all)
    finally:
        reader.end()
        for writer in siege.all:
            writer.send(signal.SIGCONT)
            writer.end()
    return siege


def test_eight_writers_under_siege(tmp_path: Path, server: EmbeddedPostgres, seeds: Seeds) -> None:
    def is_enough(siege: Siege) -> bool:
        outcomes = siege.outcomes()
        has_happened = siege.happened.keys() >= {"start", "kill", "halt", "twice", "crash"}
        return has_happened and outcomes["ack"] > 100 and outcomes["unknown"] + outcomes["refused"] > 0

    assert is_enough(besiege(tmp_path, server, seed=seeds.kept_or_new(1), seconds=60, is_enough=is_enough))


@pytest.mark.soak
def test_eight_writers_under_a_long_siege(tmp_path: Path, server: EmbeddedPostgres) -> None:
    seed = random.randrange(2**32)
    sys.stdout.write(f"seed {seed}\n")
    besiege(tmp_path, server, seed=seed, seconds=600)

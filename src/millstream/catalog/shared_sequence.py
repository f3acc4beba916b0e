"""The numbers of a stream that several writers share, kept in PostgreSQL: `ports.SequenceStore`.

Each step is the one of `protocol.sequencer.Ledger`, taken on locked rows: a transaction loads the writers, lets the
pure machine decide, and writes back what changed. Only a draw is all SQL (`draw_numbers`, created by a
migration), because it comes once a commit group. The newest number is the sequence's: it moves
by `setval` alone, a range at a time, so that every reader sees the end of a range. A draw waits for no flush: numbers
are reserved a million at a time, and after a crash of the server they go on above what was reserved (`newest_number`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, TypeVar

import psycopg
from sqlalchemy import Connection, select, text, update

import millstream.catalog.sql_tables as t
from millstream.catalog.catalog_part import lock_stream, now_us
from millstream.catalog.database import CatalogDatabase
from millstream.errors import CatalogError, SequencingError
from millstream.libpq import fetch_row
from millstream.model.ids import Epoch, StreamId, WriterId
from millstream.model.names import CATALOG_SCHEMA
from millstream.model.positions import SEQ_MAX, Seq, SeqRange
from millstream.protocol.sequencer import Drawn, Ledger, LedgerView, Registration, WriterEntry, WriterPhase

LEASE_S: Final = 5.0
"""How long a writer lives without a report: it reports with each group, and several times a lease while it is idle."""
_NO_EPOCH: Final = Epoch(0)
_CLOCK: Final = text("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint")
_NEWEST: Final = f"SELECT newest FROM {CATALOG_SCHEMA}.newest_number(:stream)"
_SETTINGS: Final = (
    "SELECT s.increment_by, s.cycle, s.cache_size, s.min_value, s.max_value, s.data_type::text, c.relpersistence"
    " FROM pg_sequences s JOIN pg_class c ON c.relname = s.sequencename JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname = s.schemaname"
    " WHERE s.schemaname = :schema AND s.sequencename = :name"
)

# One statement: if it sees the row that the first draw after a crash inserts, it reads the sequence after that draw.
NEWEST_NUMBER: Final = """
CREATE FUNCTION newest_number(for_stream text, OUT newest bigint, OUT ceiling bigint)
LANGUAGE plpgsql SET search_path = millstream, pg_temp AS $$
DECLARE
    is_whole boolean;
BEGIN
    SELECT s.started = pg_postmaster_start_time(), coalesce(c.upto, 0),
            coalesce(pg_sequence_last_value(to_regclass(format('numbers_%s', replace(for_stream, '-', '')))), 0)
        INTO is_whole, ceiling, newest
        FROM (SELECT) AS here LEFT JOIN number_ceilings c ON c.stream = for_stream LEFT JOIN number_servers s ON s.stream = for_stream;
    IF is_whole IS NOT TRUE THEN
        newest := greatest(newest, ceiling);
        ceiling := 0;
    END IF;
END $$
"""

# One round trip a commit group.
# - The writer's row is locked first: a process that fences the writer waits for the draw, and a later draw finds itself
#   fenced. The sequence moves under an advisory lock that is released before the commit. So draws of several writers
#   that flush wait for one flush together, and a later draw's flush covers an earlier one's, because they are in one WAL.
# - `first_number` is -1 if the sequence is below the numbers given to writers: it was set back, or is an older copy.
# - The settings that a transaction needs are sent with it: behind a pooler its session may be another one.
# - `elsewhere` also counts writers of the same location while they are joining: their marks may not stand yet. A writer
#   that draws has its marks in place, so it is no longer joining.
# - A draw flushes if other writers count the position that it stores: that must not go back in a crash.
DRAW_NUMBERS: Final = """
CREATE FUNCTION draw_numbers(
    for_stream text, for_writer integer, for_epoch bigint, how_many bigint, own_position bigint, lease_us bigint,
    OUT first_number bigint, OUT elsewhere bigint
) LANGUAGE plpgsql SET search_path = millstream, pg_temp AS $$
DECLARE
    numbers regclass := to_regclass(format('numbers_%s', replace(for_stream, '-', '')));
    own_location text;
    own_phase text;
    -- "mill" in front: ours among the database's advisory locks.
    lock_key bigint := (1835625580::bigint << 32) | numbers::oid::bigint;
    newest bigint;
    ceiling bigint;
    known bigint;
    flushes boolean;
BEGIN
    PERFORM set_config('lock_timeout', '15s', true);
    SELECT location, phase INTO own_location, own_phase FROM writers
        WHERE stream = for_stream AND id = for_writer AND epoch = for_epoch AND phase IN ('open', 'joining') FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF numbers IS NULL THEN
        first_number := -1;
        RETURN;
    END IF;
    PERFORM pg_advisory_lock(lock_key);
    SELECT * INTO newest, ceiling FROM newest_number(for_stream);
    SELECT max(given_to) INTO known FROM writers WHERE stream = for_stream;
    IF newest < known THEN
        first_number := -1;
    ELSIF newest <= 9223372036854775807 - how_many THEN
        PERFORM setval(numbers, newest + how_many);
        first_number := newest + 1;
    ELSE
        first_number := 0;
    END IF;
    PERFORM pg_advisory_unlock(lock_key);
    IF first_number < 1 THEN
        RETURN;
    END IF;
    UPDATE writers SET phase = 'open', position = greatest(position, own_position), last_first = first_number, last_count = how_many,
            given_to = newest + how_many,
            lease_until_us = (extract(epoch FROM clock_timestamp()) * 1000000)::bigint + draw_numbers.lease_us
        WHERE stream = for_stream AND id = for_writer;
    SELECT min(position) INTO elsewhere FROM writers
        WHERE stream = for_stream AND id <> for_writer AND phase <> 'settled'
            AND (location <> own_location OR phase = 'joining');
    flushes := newest + how_many > ceiling OR own_phase = 'joining' OR elsewhere IS NOT NULL;
    IF newest + how_many > ceiling THEN
        INSERT INTO number_ceilings VALUES (for_stream, least(newest + how_many, 9223372036853775807) + 1000000)
            ON CONFLICT (stream) DO UPDATE SET upto = greatest(number_ceilings.upto, excluded.upto);
        INSERT INTO number_servers VALUES (for_stream, pg_postmaster_start_time())
            ON CONFLICT (stream) DO UPDATE SET started = excluded.started;
    END IF;
    IF NOT flushes THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    ELSIF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
END $$
"""

_Told = TypeVar("_Told")


class PostgresSequenceStore:
    """The shared numbers of one stream.

    Args:
        lease_s: how long a writer lives without a report.

    Raises (from every step):
        CatalogError: as `Catalog`; the step may have been executed, and may still be.

    Concurrency: any number of threads and processes. Open it after a fork, never before.
    """

    def __init__(self, database: CatalogDatabase, stream: StreamId, *, lease_s: float = LEASE_S) -> None:
        self._database = database
        self._stream = stream
        self._lease_us = round(lease_s * 1e6)
        self._name = f"numbers_{stream.hex}"
        self._drawing = threading.Lock()
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None

    def close(self) -> None:
        """Close the connection for draws."""
        with self._drawing:
            self._hang_up()

    # --- steps -------------------------------------------------------------------------------------------------

    def register(self, name: str, location: str, *, above: Epoch = _NO_EPOCH) -> Registration:
        """Implement the port.

        Raises:
            SequencingError (`sequence_unusable`): the sequence was changed from outside; the hint has the SQL.
        """

        def step(connection: Connection, ledger: Ledger, now: int) -> tuple[Ledger, Registration]:
            if self._check(connection, ledger) is None:
                ledger = replace(ledger, newest=self._make(connection, ledger))
            return ledger.register(name, location, now_us=now, lease_us=self._lease_us, above=above)

        return self._step(step, begins=True)

    def take_over(self, writer: WriterId) -> Registration:
        """Implement the port."""
        return self._step(
            lambda _, ledger, now: ledger.take_over(writer, now_us=now, lease_us=self._lease_us), begins=True
        )

    def recovered(self, writer: WriterId, epoch: Epoch) -> Drawn:
        """Implement the port. It waits for draws that are being executed: of two at once, one sees the other."""
        return self._step(
            lambda _, ledger, now: ledger.recovered(writer, epoch, now_us=now, lease_us=self._lease_us), begins=True
        )

    def draw(self, writer: WriterId, epoch: Epoch, count: int, *, position: Seq) -> Drawn:
        """Implement the port, in one round trip."""
        if not 0 < count < SEQ_MAX:
            raise SequencingError(
                f"{count} numbers can't be given out", code="invalid_count", hint="Ask for at least 1.", count=count
            )
        arguments = (str(self._stream), writer, epoch, count, position, self._lease_us)
        with self._drawing:
            try:
                row = fetch_row(self._line(), _DRAW, *arguments)
            except (psycopg.Error, CatalogError) as error:
                self._hang_up()
                raise error if isinstance(error, CatalogError) else self._database.translate(error) from error
        first, elsewhere = row or (None, None)
        if first == 0:
            raise SequencingError(
                f"{count} numbers are more than the stream has left",
                code="invalid_count",
                hint=f"{self._named} was set to its end: `SELECT max(given_to) FROM {CATALOG_SCHEMA}.writers` shows where it was.",
                count=count,
            )
        if first == -1:
            self.check()
            raise CatalogError(f"the sequence {self._named} can't be drawn from, and then it could; try again")
        if first is None:
            # The pure machine raises the error with the cause.
            self._look(lambda ledger: ledger.draw(writer, epoch, count, position=position, now_us=0, lease_us=0))
            raise CatalogError(f"writer {writer} of stream {self._stream} drew nothing, though it may draw")
        return Drawn(SeqRange(Seq(first), count), Seq(SEQ_MAX if elsewhere is None else elsewhere))

    def last(self, writer: WriterId, epoch: Epoch) -> SeqRange:
        """Implement the port; waits for a draw that is being executed."""
        return self._step(lambda _, ledger, _now: (ledger, ledger.last(writer, epoch)), of=writer)

    def report(self, writer: WriterId, epoch: Epoch, *, position: Seq, is_shown: bool = True) -> tuple[LedgerView, Seq]:
        """Implement the port."""

        def step(_: Connection, ledger: Ledger, now: int) -> tuple[Ledger, tuple[LedgerView, Seq]]:
            timed = {"now_us": now, "lease_us": self._lease_us}
            after, view = ledger.report(writer, epoch, position=position, is_shown=is_shown, **timed)
            return after, (view, after.elsewhere(after.entry(writer)))

        return self._step(step, of=writer)

    def settle(self, writer: WriterId, epoch: Epoch) -> None:
        """Implement the port."""
        self._step(lambda _, ledger, _now: (ledger.settle(writer, epoch), None), of=writer)

    def forget(self, writer: WriterId) -> None:
        """Implement the port."""
        self._step(lambda _, ledger, now: (ledger.forget(writer, now_us=now), None), begins=True)

    def view(self) -> LedgerView:
        """Implement the port."""
        ledger, now = self.look()
        return ledger.view(now)

    def look(self) -> tuple[Ledger, int]:
        """Return the writers and their numbers, and the server's time in microseconds since 1970."""
        with self._database.read() as connection:
            now = server_time_us(connection)
            return self._seen(connection), now

    def writers(self) -> Sequence[WriterEntry]:
        """Implement the port."""
        return self._look(lambda ledger: ledger.writers)

    def check(self) -> None:
        """Raise `sequence_unusable` if the sequence isn't as it was created. Nothing is changed."""
        with self._database.read() as connection:
            self._check(connection, self._seen(connection))

    # --- inside ------------------------------------------------------------------------------------------------

    def _step(
        self,
        step: Callable[[Connection, Ledger, int], tuple[Ledger, _Told]],
        *,
        of: WriterId | None = None,
        begins: bool = False,
    ) -> _Told:
        """Take one step on locked rows: of one writer, or (if an epoch is given out) of the whole stream."""
        with self._database.write() as connection:
            if begins:
                lock_stream(connection, self._stream)
            mine = t.writers.c.stream == str(self._stream)
            locked = mine if begins else mine & (t.writers.c.id == of)
            connection.execute(
                select(t.writers.c.id).where(locked).order_by(t.writers.c.id).with_for_update(key_share=True)
            )
            now = connection.execute(_CLOCK).scalar_one()
            before = self._load(connection)
            after, told = step(connection, before, now)
            self._store(connection, before, after)
            return told

    def _look(self, look: Callable[[Ledger], _Told]) -> _Told:
        with self._database.read() as connection:
            return look(self._seen(connection))

    def _seen(self, connection: Connection) -> Ledger:
        """Return the ledger in an open snapshot: the sequence, which isn't part of snapshots, may be ahead of it."""
        ledger = self._load(connection, with_newest=False)
        return with_newest_known(ledger)

    def _load(self, connection: Connection, *, with_newest: bool = True) -> Ledger:
        """Load the newest number first, then the writers: a writer that registers between is given numbers above it."""
        newest = 0
        if with_newest:
            newest = connection.execute(text(_NEWEST), {"stream": str(self._stream)}).scalar_one()
        epoch = connection.execute(select(t.streams.c.epoch).where(t.streams.c.id == str(self._stream))).scalar_one()
        query = select(t.writers).where(t.writers.c.stream == str(self._stream)).order_by(t.writers.c.id)
        return Ledger(Seq(newest), Epoch(epoch), tuple(writer_entry(row) for row in connection.execute(query)))

    def _store(self, connection: Connection, before: Ledger, after: Ledger) -> None:
        if after.epoch != before.epoch:
            here = t.streams.c.id == str(self._stream)
            connection.execute(update(t.streams).where(here).values(epoch=after.epoch))
        known = {entry.writer: entry for entry in before.writers}
        for entry in after.writers:
            values = {
                "name": entry.name,
                "location": entry.location,
                "epoch": entry.epoch,
                "phase": entry.phase.value,
                "position": entry.position,
                "last_first": entry.last.first,
                "last_count": entry.last.count,
                "given_to": entry.given_to,
                "lease_until_us": entry.lease_until_us,
                "cut_at": entry.cut_at,
            }
            if entry.writer not in known or known[entry.writer].epoch != entry.epoch:
                values["pid"] = os.getpid()
            if entry.writer not in known:
                fresh = {"stream": str(self._stream), "id": entry.writer, "registered_us": now_us()}
                connection.execute(self._database.insert(t.writers).values(**fresh, **values))
            elif known[entry.writer] != entry:
                mine = (t.writers.c.stream == str(self._stream)) & (t.writers.c.id == entry.writer)
                connection.execute(update(t.writers).where(mine).values(**values))

    @property
    def _named(self) -> str:
        return f"{CATALOG_SCHEMA}.{self._name}"

    def _given(self, connection: Connection, ledger: Ledger) -> Seq:
        """Return the greatest number known to have been given, or reserved by an owner of the stream."""
        reserved = select(t.streams.c.reserved).where(t.streams.c.id == str(self._stream))
        return Seq(max([connection.execute(reserved).scalar_one(), *(entry.given_to for entry in ledger.writers)]))

    def _make(self, connection: Connection, ledger: Ledger) -> Seq:
        """Create the sequence; return its position. The stream is locked."""
        given = self._given(connection, ledger)
        connection.execute(text(f"CREATE SEQUENCE {self._named}"))
        if given:
            connection.execute(
                text("SELECT setval(CAST(:name AS regclass), :value)"), {"name": self._named, "value": given}
            )
        return given

    def _check(self, connection: Connection, ledger: Ledger) -> Seq | None:
        """Return the sequence's position; None if it isn't created so far.

        `sequence_unusable` if it isn't as it was created.
        """
        given = self._given(connection, ledger)
        found = connection.execute(text(_SETTINGS), {"schema": CATALOG_SCHEMA, "name": self._name}).one_or_none()
        if found is None:
            if any(entry.given_to for entry in ledger.writers):
                raise SequencingError(
                    f"the sequence {self._named} is gone, though numbers up to {given} were given out",
                    code="sequence_unusable",
                    hint=f"CREATE SEQUENCE {self._named}; SELECT setval('{self._named}', {given});",
                    given=int(given),
                )
            return None
        increment, cycles, cached, low, high, kind, persistence = found
        wrong = [
            what
            for is_wrong, what in (
                (increment != 1, f"INCREMENT {increment}"),
                (cycles, "CYCLE"),
                (cached != 1, f"CACHE {cached}"),
                (low != 1 or high != SEQ_MAX, f"MINVALUE {low} MAXVALUE {high}"),
                (kind != "bigint", f"AS {kind}"),
                (persistence != "p", "UNLOGGED"),
            )
            if is_wrong
        ]
        if wrong:
            raise SequencingError(
                f"the sequence {self._named} was altered: it has {', '.join(wrong)}",
                code="sequence_unusable",
                hint=f"ALTER SEQUENCE {self._named} AS bigint INCREMENT 1 NO CYCLE CACHE 1 MINVALUE 1 MAXVALUE {SEQ_MAX};"
                + (f" ALTER SEQUENCE {self._named} SET LOGGED;" if persistence != "p" else ""),
                found=wrong,
            )
        last = connection.execute(text(_NEWEST), {"stream": str(self._stream)}).scalar_one()
        if last < given:
            raise SequencingError(
                f"the sequence {self._named} was restarted or set back: it stands at {last}, though numbers up to {given} were given out",
                code="sequence_unusable",
                hint=f"SELECT setval('{self._named}', {given});",
                found=int(last),
                given=int(given),
            )
        return Seq(last)

    def _line(self) -> psycopg.Connection[tuple[Any, ...]]:
        """Return the connection for draws: dedicated, and dropped after any error."""
        if self._connection is None or self._connection.closed:
            assert self._database.address is not None
            self._connection = psycopg.connect(self._database.address, autocommit=True, prepare_threshold=None)
        return self._connection

    def _hang_up(self) -> None:
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.close()
            self._connection = None


_DRAW: Final = f"SELECT * FROM {CATALOG_SCHEMA}.draw_numbers({{}}::text, {{}}::integer, {{}}::bigint, {{}}::bigint, {{}}::bigint, {{}}::bigint)"


def server_time_us(connection: Connection) -> int:
    """Return the server's time in microseconds since 1970."""
    return int(connection.execute(_CLOCK).scalar_one())


def with_newest_known(ledger: Ledger) -> Ledger:
    """Return the ledger with the newest number that a writer has: the sequence itself may be ahead."""
    newest = max((max(entry.given_to, entry.position) for entry in ledger.writers), default=Seq(0))
    return replace(ledger, newest=newest)


def writer_entry(row: Any) -> WriterEntry:
    """Return a row of `writers` as the entry of a writer that shares its stream's numbers."""
    return WriterEntry(
        WriterId(row.id),
        row.name,
        row.location,
        Epoch(row.epoch),
        WriterPhase(row.phase),
        Seq(row.position),
        SeqRange(Seq(row.last_first), row.last_count),
        Seq(row.given_to),
        row.lease_until_us,
        None if row.cut_at is None else Seq(row.cut_at),
    )

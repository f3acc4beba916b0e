"""The first catalog: its tables and, on PostgreSQL, the functions that draw a stream's numbers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Draws don't wait for the server's disk. The first draw of a million numbers raises the stream's ceiling durably; the
# draws below it commit asynchronously. A server that crashes may forget them, and its sequence goes back. It also
# empties the unlogged table, so that the numbers go on above the ceiling. (The start time says the same of a server
# that keeps unlogged tables, or of a dump that is restored.)
CEILINGS = "CREATE TABLE number_ceilings (stream text PRIMARY KEY, upto bigint NOT NULL)"
SERVERS = "CREATE UNLOGGED TABLE number_servers (stream text PRIMARY KEY, started timestamptz NOT NULL)"
# One statement: if it sees the row that the first draw after a crash inserts, it reads the sequence after that draw.
NEWEST = """
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
DRAW = """
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


def upgrade() -> None:
    """Create the tables, and the functions."""
    op.create_table(
        "streams",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, nullable=False, unique=True),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("reserved", sa.BigInteger, nullable=False, server_default="0"),
    )
    op.create_table(
        "writers",
        sa.Column("stream", sa.Text, sa.ForeignKey("streams.id"), primary_key=True),
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("registered_us", sa.BigInteger, nullable=False),
        sa.Column("location", sa.Text, nullable=False, server_default=""),
        sa.Column("phase", sa.Text, nullable=False, server_default="settled"),
        sa.Column("position", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("last_first", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("last_count", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("given_to", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("lease_until_us", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("cut_at", sa.BigInteger),
        sa.UniqueConstraint("stream", "name", name="uq_writers_name"),
    )
    op.create_table(
        "sources",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("stream", sa.Text, sa.ForeignKey("streams.id"), nullable=False),
        sa.Column("system_identifier", sa.Text, nullable=False),
        sa.Column("database", sa.Text, nullable=False),
        sa.Column("timeline", sa.BigInteger, nullable=False),
        sa.Column("reached", sa.BigInteger, nullable=False, server_default="0"),
        sa.UniqueConstraint("stream", "system_identifier", "database", "timeline", name="uq_sources_branch"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "tables",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("stream", sa.Text, sa.ForeignKey("streams.id"), nullable=False),
        sa.Column("source", sa.Integer, nullable=False),
        sa.Column("relation_oid", sa.BigInteger, nullable=False),
        sa.Column("namespace", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("shard", sa.Integer, nullable=False, server_default="0"),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False, server_default=""),
        sa.Column("details", sa.Text, nullable=False, server_default="{}"),
        sa.Column("schema_version", sa.Integer, nullable=False, server_default="0"),
        sa.Column("copy_id", sa.Text, nullable=False, server_default=""),
        sa.Column("changed_us", sa.BigInteger, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_tables_stream", "tables", ["stream"])
    op.create_table(
        "schema_versions",
        sa.Column("table_id", sa.Integer, sa.ForeignKey("tables.id"), primary_key=True),
        sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("fingerprint", sa.Text, nullable=False),
        sa.Column("arrow", sa.LargeBinary, nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("table_id", "fingerprint", name="uq_schema_versions_facts"),
    )
    op.create_table(
        "copy_chunks",
        sa.Column("table_id", sa.Integer, sa.ForeignKey("tables.id"), primary_key=True),
        sa.Column("copy_id", sa.Text, primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("lower", sa.Text),
        sa.Column("upper", sa.Text),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("snapshot", sa.Text),
        sa.Column("lsn", sa.BigInteger),
        sa.Column("row_count", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("size_bytes", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("facts", sa.Text, nullable=False, server_default="{}"),
    )
    op.create_table(
        "pipelines",
        sa.Column("stream", sa.Text, sa.ForeignKey("streams.id"), primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("needed_from", sa.BigInteger),
        sa.Column("landed", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("changed_us", sa.BigInteger, nullable=False),
        sa.Column("kind", sa.Text, nullable=False, server_default="pipeline"),
        sa.Column("cut_off_at", sa.BigInteger),
        sa.Column("position", sa.Text),
    )
    op.create_table(
        "facts",
        sa.Column("scope", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
    )
    op.create_table(
        "access_tokens",
        sa.Column("home", sa.Text, primary_key=True, server_default=""),
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("rights", sa.Text, nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.Column("expires_us", sa.BigInteger),
        sa.UniqueConstraint("home", "name", name="uq_access_tokens_name"),
    )
    if op.get_bind().dialect.name == "postgresql":
        for statement in (CEILINGS, SERVERS, NEWEST, DRAW):
            op.execute(statement)

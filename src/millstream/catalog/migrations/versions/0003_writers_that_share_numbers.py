"""Writers that share a stream's numbers: positions, leases, and (on PostgreSQL) the step that gives numbers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

# One round trip a commit group. The writer's row is locked first: a process that fences the writer waits for the
# draw, and a later draw finds itself fenced. The sequence moves under an advisory lock that is released before the
# commit. So draws of several writers wait for one flush together, and a later draw's flush covers an earlier one's,
# because they are in one WAL.
DRAW = """
CREATE FUNCTION draw_numbers(
    for_stream text, for_writer integer, for_epoch bigint, how_many bigint, own_position bigint, lease_us bigint,
    OUT first_number bigint, OUT elsewhere bigint
) LANGUAGE plpgsql SET search_path = millstream, pg_temp AS $$
DECLARE
    numbers regclass := to_regclass(format('numbers_%s', replace(for_stream, '-', '')));
    own_location text;
    -- "mill" in front: ours among the database's advisory locks.
    lock_key bigint := (1835625580::bigint << 32) | numbers::oid::bigint;
    newest bigint;
BEGIN
    SELECT location INTO own_location FROM writers
        WHERE stream = for_stream AND id = for_writer AND epoch = for_epoch AND phase = 'open' FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF numbers IS NULL THEN
        RAISE EXCEPTION 'the sequence of the numbers of stream % is gone', for_stream USING ERRCODE = 'undefined_table';
    END IF;
    PERFORM pg_advisory_lock(lock_key);
    newest := coalesce(pg_sequence_last_value(numbers), 0);
    IF newest <= 9223372036854775807 - how_many THEN
        PERFORM setval(numbers, newest + how_many);
        first_number := newest + 1;
    ELSE
        first_number := 0;
    END IF;
    PERFORM pg_advisory_unlock(lock_key);
    IF first_number = 0 THEN
        RETURN;
    END IF;
    UPDATE writers SET position = greatest(position, own_position), last_first = first_number, last_count = how_many,
            given_to = newest + how_many,
            lease_until_us = (extract(epoch FROM clock_timestamp()) * 1000000)::bigint + draw_numbers.lease_us
        WHERE stream = for_stream AND id = for_writer;
    SELECT min(position) INTO elsewhere FROM writers
        WHERE stream = for_stream AND phase <> 'settled' AND location <> own_location;
END $$
"""


def upgrade() -> None:
    """Add the columns; an existing writer owned its stream, and is settled."""
    op.add_column("writers", sa.Column("location", sa.Text, nullable=False, server_default=""))
    op.add_column("writers", sa.Column("phase", sa.Text, nullable=False, server_default="settled"))
    for name in ("position", "last_first", "last_count", "given_to", "lease_until_us"):
        op.add_column("writers", sa.Column(name, sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("writers", sa.Column("cut_at", sa.BigInteger))
    if op.get_bind().dialect.name == "postgresql":
        op.execute(DRAW)

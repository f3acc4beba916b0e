"""The step that gives numbers counts writers that join: no reader sees the stream's position go back while one does."""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

# As in 0004, with two changes:
# - `elsewhere` also counts writers of the same location while they are joining: their marks may not stand yet.
# - A writer that draws has its marks in place, so it is no longer joining.
DRAW = """
CREATE OR REPLACE FUNCTION draw_numbers(
    for_stream text, for_writer integer, for_epoch bigint, how_many bigint, own_position bigint, lease_us bigint,
    OUT first_number bigint, OUT elsewhere bigint
) LANGUAGE plpgsql SET search_path = millstream, pg_temp AS $$
DECLARE
    numbers regclass := to_regclass(format('numbers_%s', replace(for_stream, '-', '')));
    own_location text;
    -- "mill" in front: ours among the database's advisory locks.
    lock_key bigint := (1835625580::bigint << 32) | numbers::oid::bigint;
    newest bigint;
    known bigint;
BEGIN
    PERFORM set_config('lock_timeout', '15s', true);
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    SELECT location INTO own_location FROM writers
        WHERE stream = for_stream AND id = for_writer AND epoch = for_epoch AND phase IN ('open', 'joining') FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF numbers IS NULL THEN
        first_number := -1;
        RETURN;
    END IF;
    PERFORM pg_advisory_lock(lock_key);
    newest := coalesce(pg_sequence_last_value(numbers), 0);
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
END $$
"""


def upgrade() -> None:
    """Replace the function."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute(DRAW)

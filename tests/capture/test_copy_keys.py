"""A copy in chunks finds every row once, whatever the table's key is made of."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.capture.capture_stage import Stage, staged
from tests.capture.test_copying import copied_rows

from millstream.testing.postgres import EmbeddedPostgres

_numbers = itertools.count(1)

ROWS = 600
ODD_TEXTS = r"""(ARRAY['', ' ', 'a', 'A', 'ä', 'Ä', 'ae', 'z', 'Z', 'ß', 'ss', '-', '_', '\', E'\t', E'\n', '''', '"', 'é', E'e\u0301',
    '10', '9', '😀', E'\u007f', 'ﬀ'])[1 + i % 25] || (i / 25)"""

KEYS = {
    "integer": ("id int PRIMARY KEY", "(i - 300) * 7919"),
    "bigint at its ends": ("id bigint PRIMARY KEY", "CASE i % 2 WHEN 0 THEN 9223372036854775807 - i ELSE i - 9223372036854775808 END"),
    "uuid": ("id uuid PRIMARY KEY", "md5(i::text)::uuid"),
    "numeric of many scales": ("id numeric PRIMARY KEY", "round(i - 300 + 0.5, i % 7)"),
    "numeric with NaN and infinities": ("id numeric PRIMARY KEY", "CASE i WHEN 1 THEN 'NaN' WHEN 2 THEN 'Infinity' WHEN 3 THEN '-Infinity' ELSE (i * 1e37)::numeric END"),
    "double with NaN, infinities and neighbours": ("id float8 PRIMARY KEY", "CASE i WHEN 1 THEN 'NaN' WHEN 2 THEN 'Infinity' WHEN 3 THEN '-Infinity' ELSE (0.1 + 0.2) * (i - 300) END"),
    "timestamptz with infinities and BC": ("id timestamptz PRIMARY KEY", "CASE i WHEN 1 THEN 'infinity' WHEN 2 THEN '-infinity' WHEN 3 THEN '4000-01-01 BC' ELSE timestamptz '2024-03-31 00:00+02' + i * interval '7.000001 min' END"),
    "interval": ("id interval PRIMARY KEY", "make_interval(days => i, secs => i * 0.000001)"),
    "boolean and smallint": ("a bool, b smallint, PRIMARY KEY (a, b)", "i % 2 = 0, i / 2 - 100"),
    "bytea": ("id bytea PRIMARY KEY", r"decode(lpad(to_hex(i * 257), 6, '0'), 'hex') || '\x00'::bytea"),
    "inet": ("id inet PRIMARY KEY", "('10.0.' || i / 250 || '.' || i % 250 || '/' || 8 + i % 25)::inet"),
    "an enum and a number": ("a mood, b int, PRIMARY KEY (a, b)", "(ARRAY['sad', 'ok', 'happy'])[1 + i % 3]::mood, i"),
    "a domain over text": ("id label PRIMARY KEY", "'l' || i"),
    "an array": ("id int[] PRIMARY KEY", "ARRAY[i % 7, i, NULL]"),
    "a range": ("id int4range PRIMARY KEY", "int4range(i % 7, 1000 + i)"),
    "bpchar with blanks at its end": ("id char(8) PRIMARY KEY", "rpad(i::text, 3 + i % 6)"),
    "text in C": ('id text COLLATE "C" PRIMARY KEY', ODD_TEXTS),
    "text in the database's collation": ("id text PRIMARY KEY", ODD_TEXTS),
    "one value in all rows but in the last column": ("a text, b int, PRIMARY KEY (a, b)", "'same', i"),
    "an index that falls": ("a int NOT NULL, b text NOT NULL); CREATE UNIQUE INDEX keys_ab ON keys (a DESC, b); ALTER TABLE keys REPLICA IDENTITY USING INDEX keys_ab; SELECT (1", "i % 10, 'b' || i"),
    "the primary key under FULL": ("id int PRIMARY KEY); ALTER TABLE keys REPLICA IDENTITY FULL; SELECT (1", "i - 300"),
}  # fmt: skip
ICU_KEYS = {
    "text in ICU's": ('id text COLLATE "und-x-icu" PRIMARY KEY', ODD_TEXTS),
    "text that doesn't tell case": ("id text COLLATE no_case PRIMARY KEY", "CASE i % 2 WHEN 0 THEN 'row ' ELSE 'ROW ' END || i"),
    "composite of text and number, in another order": ('a int, b text COLLATE "und-x-icu", c uuid, PRIMARY KEY (c, b, a)', "i % 3, 'b' || i % 50, md5((i / 20)::text)::uuid"),
    "an index with a collation of its own": ('id text COLLATE no_case NOT NULL); CREATE UNIQUE INDEX keys_id ON keys (id COLLATE "C"); ALTER TABLE keys REPLICA IDENTITY USING INDEX keys_id; SELECT (1', "CASE i % 2 WHEN 0 THEN 'row ' ELSE 'ROW ' END || i / 2"),
    "text in German, by a locale of ICU": ('id text COLLATE "de-x-icu" PRIMARY KEY', ODD_TEXTS),
    "two texts that don't tell case": ("a text COLLATE no_case, b text COLLATE no_case, PRIMARY KEY (a, b)", "CASE i % 2 WHEN 0 THEN 'row ' ELSE 'ROW ' END || i / 20, CASE i % 3 WHEN 0 THEN 'x' ELSE 'X' END || i % 20"),
}  # fmt: skip


@pytest.fixture(scope="module")
def icu_server() -> Iterator[EmbeddedPostgres]:
    """Yield a server with ICU's collations, which the server from pip lacks."""
    with EmbeddedPostgres(17, fsync=False) as server:
        yield server


@pytest.fixture
def icu_stage(icu_server: EmbeddedPostgres, tmp_path: Path) -> Iterator[Stage]:
    name = f"icu_{next(_numbers)}"
    with staged(icu_server.create_database(name), tmp_path, name) as made:
        yield made
    icu_server.drop_database(name)


def copy_in_chunks(stage: Stage, columns: str, values: str) -> None:
    stage.sql(
        "CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy')",
        "CREATE DOMAIN label AS text CHECK (value <> '')",
        f"CREATE TABLE keys (n int DEFAULT 0, {columns})",
    )
    with stage.connect() as connection:
        found = connection.execute(
            "SELECT attname FROM pg_attribute WHERE attrelid = 'keys'::regclass AND attnum > 0 AND attname <> 'n' ORDER BY attnum"
        ).fetchall()
    names = [str(row[0]) for row in found]
    stage.sql(
        f"INSERT INTO keys ({', '.join(names)}) SELECT {values} FROM generate_series(1, {ROWS}) i ORDER BY md5(i::text)",
        "ANALYZE keys",
    )
    stage.config = replace(stage.config, copy_workers=2, chunk_rows=37)
    outcome = stage.catch_up()

    assert not outcome.quarantined
    assert copied_rows(stage, "keys") == ROWS
    assert stage.log.replay()["public.keys"] == stage.source_rows("keys", names)


@pytest.mark.sampled
@pytest.mark.parametrize("what", KEYS)
def test_a_copy_in_chunks_finds_every_row_once(stage: Stage, what: str) -> None:
    copy_in_chunks(stage, *KEYS[what])


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("what", ICU_KEYS)
def test_a_copy_in_chunks_finds_every_row_once_under_any_collation(icu_stage: Stage, what: str) -> None:
    icu_stage.sql("CREATE COLLATION no_case (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
    copy_in_chunks(icu_stage, *ICU_KEYS[what])

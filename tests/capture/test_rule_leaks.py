"""Values that rules keep at the source, searched for in every byte that capture stores, where they might slip through."""

from __future__ import annotations

from dataclasses import replace

import pytest
from structlog.testing import capture_logs
from tests.capture.beside import wait_until
from tests.capture.capture_stage import Stage
from tests.capture.test_column_rules import TABLE, digest, holds, records, ruled

from millstream.catalog import TableState
from millstream.errors import MillstreamError
from millstream.model.column_rules import Rule, SourceRules
from millstream.protocol.catch_up_mode import CatchUpMode

SECRET = "canary-7c1f"
ROOT = (
    "CREATE TABLE users (id int PRIMARY KEY, ssn text) PARTITION BY RANGE (id)",
    "CREATE TABLE low PARTITION OF users FOR VALUES FROM (0) TO (10)",
    "CREATE TABLE high PARTITION OF users FOR VALUES FROM (10) TO (20)",
    f"INSERT INTO users VALUES (1, '{SECRET}-1'), (11, '{SECRET}-2')",
)


def nothing_leaked(stage: Stage) -> None:
    assert SECRET not in repr([(rows.schema, row) for rows, _, row in stage.log.records()])
    assert not holds(stage.folder, SECRET)
    assert SECRET not in repr(
        [(row.reason, row.details) for row in stage.catalog.tables(stage.catalog.stream("shop").id)]
    )


@pytest.mark.parametrize("rule", [Rule.HASH, Rule.EXCLUDE])
def test_a_detached_partition_keeps_its_root_s_rules(stage: Stage, rule: Rule) -> None:
    stage.sql(*ROOT)
    ruled(stage, {"ssn": rule})
    stage.catch_up()
    stage.sql("ALTER TABLE users DETACH PARTITION low", f"INSERT INTO low VALUES (2, '{SECRET}-3')")
    stage.catch_up()
    stage.sql(f"INSERT INTO low VALUES (3, '{SECRET}-4')", f"UPDATE low SET ssn = '{SECRET}-5' WHERE id = 1")
    stage.catch_up()
    nothing_leaked(stage)
    assert stage.state("public.low") is TableState.STREAMING
    assert {row["id"] for row in records(stage, "low")} >= {"1", "2", "3"}
    if rule is Rule.HASH:
        assert digest(f"{SECRET}-5") in repr(records(stage, "low"))


def test_a_publication_of_partitions_sends_no_values(stage: Stage) -> None:
    stage.sql(*ROOT)
    stage.sql(f"CREATE PUBLICATION {stage.config.publication} FOR TABLE users")
    ruled(stage, {"ssn": Rule.HASH})
    stage.catch_up()
    stage.sql(f"INSERT INTO users VALUES (2, '{SECRET}-3')", f"INSERT INTO low VALUES (3, '{SECRET}-4')")
    stage.catch_up()
    nothing_leaked(stage)


@pytest.mark.long
def test_a_large_transaction_with_subtransactions_that_abort_spills_nothing(stage: Stage) -> None:
    stage.sql(TABLE, "ALTER TABLE users REPLICA IDENTITY FULL")
    ruled(stage, buffer_bytes_max=64 << 10)
    running = stage.start()
    wait_until(lambda: stage.state("public.users") is not None, "the table")
    with stage.connect() as connection, connection.transaction():
        connection.execute("SET LOCAL logical_decoding_work_mem = '64kB'")
        for n in range(4):
            with connection.transaction(force_rollback=n % 2 == 0):
                connection.execute(
                    f"INSERT INTO users SELECT n, '{SECRET}-a', '{SECRET}-b', '{SECRET}-c', n"
                    f" FROM generate_series({n * 3000}, {n * 3000 + 2999}) n"
                )
        connection.execute(f"UPDATE users SET email = '{SECRET}-d' WHERE id % 100 = 0")
        connection.execute("DELETE FROM users WHERE id % 7 = 0")
    running.stop()
    stage.catch_up()
    assert digest(f"{SECRET}-d") in repr(records(stage))
    nothing_leaked(stage)


def test_a_column_named_as_one_of_ours_is_not_filled_from_its_raw_past(stage: Stage) -> None:
    stage.sql(
        'CREATE TABLE users (id int PRIMARY KEY, "__seq" text, age int)',
        'ALTER TABLE users ALTER "__seq" SET STORAGE EXTERNAL',
        f"INSERT INTO users VALUES (1, repeat('{SECRET}', 900), 1)",
    )
    stage.catch_up()
    stage.sql("UPDATE users SET age = 2")
    before = len(records(stage))
    ruled(stage, {"__seq": Rule.HASH})
    stage.catch_up()
    later = records(stage)[before:]
    assert later
    assert all(not row["__unchanged"] for row in later)


@pytest.mark.long
def test_a_left_out_table_that_comes_back_has_its_rules(stage: Stage) -> None:
    stage.sql(TABLE, "CREATE TABLE other (id int PRIMARY KEY)", "ALTER TABLE users REPLICA IDENTITY FULL")
    ruled(stage)
    stage.catch_up()
    config = stage.config
    stage.config = replace(config, tables=("public.other",), rules=SourceRules(), buffer_bytes_max=64 << 10)
    fill = f"INSERT INTO users SELECT n, '{SECRET}-a', '{SECRET}-b', '{SECRET}-c', n FROM generate_series(1, 3000) n"
    stage.sql(fill, "INSERT INTO other VALUES (1)")
    stage.catch_up()
    stage.config = replace(config, buffer_bytes_max=64 << 10)
    stage.sql("UPDATE users SET age = 0 WHERE id < 10", f"UPDATE users SET email = '{SECRET}-d' WHERE id = 1")
    stage.catch_up()
    assert digest(f"{SECRET}-d") in repr(records(stage))
    nothing_leaked(stage)


def test_a_backlog_in_chunks_has_the_rules(stage: Stage) -> None:
    stage.sql(TABLE)
    ruled(stage, catch_up=CatchUpMode.ALWAYS, buffer_bytes_max=64 << 10)
    stage.catch_up()
    stage.sql(
        f"INSERT INTO users SELECT n, '{SECRET}-a', '{SECRET}-b', '{SECRET}-c', n FROM generate_series(1, 3000) n",
        f"UPDATE users SET email = '{SECRET}-d', ssn = '{SECRET}-e'",
    )
    stage.catch_up()
    assert digest(f"{SECRET}-d") in repr(records(stage))
    nothing_leaked(stage)


@pytest.mark.since_postgres(15)
@pytest.mark.parametrize("comes_by", ["copy", "stream"])
def test_a_row_filter_that_fails_on_a_value_does_not_tell_it(stage: Stage, comes_by: str) -> None:
    """PostgreSQL's message quotes the value: it stood in the catalog, in the log of the process and in its error."""
    filtered = f"CREATE PUBLICATION {stage.config.publication} FOR TABLE users WHERE (int4in(textout(name)) > 0)"
    stage.sql(TABLE, "ALTER TABLE users REPLICA IDENTITY FULL", filtered)
    ruled(stage)
    if comes_by == "stream":
        stage.catch_up()
    stage.sql(f"INSERT INTO users VALUES (1, 's', 'e', '{SECRET}', 3)")
    with capture_logs() as lines:
        if comes_by == "copy":
            said = stage.catch_up().quarantined["public.users"]
        else:
            with pytest.raises(MillstreamError) as caught:
                stage.catch_up()
            said = repr(caught.value.as_dict())
    assert "PostgreSQL can't compute a value (22P02)" in said
    assert SECRET not in f"{said}{lines}"
    nothing_leaked(stage)


@pytest.mark.parametrize("via_root", [True, False])
def test_a_table_that_is_left_out_leaves_out_its_partitions(stage: Stage, *, via_root: bool) -> None:
    """A wildcard took the partitions as tables of their own, without the rules that went with their root."""
    stage.sql(*ROOT, "CREATE TABLE other (id int PRIMARY KEY)")
    if not via_root:
        stage.sql(f"CREATE PUBLICATION {stage.config.publication} FOR TABLE users, other")
    ruled(stage, {"ssn": Rule.EXCLUDE})
    stage.catch_up()
    stage.config = replace(stage.config, tables=("public.*", "!public.users"), rules=SourceRules())
    stage.sql(f"UPDATE users SET ssn = '{SECRET}-3'", "INSERT INTO other VALUES (1)")
    stage.catch_up()
    stage.sql("CREATE TABLE late PARTITION OF users FOR VALUES FROM (20) TO (30)")
    stage.sql(f"INSERT INTO users VALUES (2, '{SECRET}-4'), (21, '{SECRET}-5')", "INSERT INTO other VALUES (2)")
    stage.catch_up()
    nothing_leaked(stage)
    assert {row["id"] for row in records(stage, "other")} == {"1", "2"}
    assert stage.state("public.other") is TableState.STREAMING


@pytest.mark.parametrize("lives", [True, False])
def test_a_partition_that_the_stream_alone_shows_is_left_out(stage: Stage, *, lives: bool) -> None:
    """A publication of all tables sends it before any look has listed it, or after it was dropped."""
    stage.sql("CREATE TABLE users (id int PRIMARY KEY, ssn text) PARTITION BY RANGE (id)")
    stage.sql("CREATE TABLE other (id int PRIMARY KEY)")
    stage.sql(f"CREATE PUBLICATION {stage.config.publication} FOR ALL TABLES")
    stage.config = replace(stage.config, tables=("public.*", "!public.users"))
    stage.catch_up()
    stage.sql("CREATE TABLE low PARTITION OF users FOR VALUES FROM (0) TO (10)")
    stage.sql(f"INSERT INTO users VALUES (1, '{SECRET}-1')", "INSERT INTO other VALUES (1)")
    if not lives:
        stage.sql("DROP TABLE low")
    with capture_logs() as lines:
        stage.catch_up()
    left_out = [line["table"] for line in lines if "may have been a partition" in line["event"]]
    assert left_out == ([] if lives else ["public.low"])
    nothing_leaked(stage)
    assert stage.state("public.low") is None
    assert len(records(stage, "other")) == 1


def test_a_dropped_table_that_a_pattern_names_is_captured_beside_a_left_out_partitioned_one(stage: Stage) -> None:
    stage.sql(*ROOT, f"CREATE PUBLICATION {stage.config.publication} FOR ALL TABLES")
    stage.sql("CREATE TABLE other (id int PRIMARY KEY)")
    stage.config = replace(stage.config, tables=("public.*", "!public.users", "public.staging_*"))
    stage.catch_up()
    stage.sql("CREATE TABLE staging_1 (id int PRIMARY KEY)", "INSERT INTO staging_1 VALUES (7)", "DROP TABLE staging_1")
    stage.catch_up()
    assert [row["id"] for row in records(stage, "staging_1")] == ["7"]


@pytest.mark.parametrize("tables", [("public.low",), ("public.*", "!public.users", "public.lo*")])
def test_a_partition_that_is_named_has_the_rules_of_its_table(stage: Stage, tables: tuple[str, ...]) -> None:
    stage.sql(*ROOT)
    ruled(stage, {"ssn": Rule.HASH}, tables=tables)
    stage.catch_up()
    stage.sql(f"INSERT INTO users VALUES (2, '{SECRET}-3'), (12, '{SECRET}-4')")
    stage.catch_up()
    assert {row["ssn"] for row in records(stage, "low")} == {digest(f"{SECRET}-1"), digest(f"{SECRET}-3")}
    assert stage.state("public.high") is None
    nothing_leaked(stage)


@pytest.mark.parametrize("rule", [Rule.HASH, Rule.EXCLUDE])
def test_a_table_that_is_attached_between_two_looks_has_the_rules_of_its_new_root(stage: Stage, rule: Rule) -> None:
    """A table that a look had found without rules went on without them until the next look."""
    stage.sql(*ROOT, "CREATE TABLE lost (id int PRIMARY KEY, ssn text)")
    stage.sql(f"CREATE PUBLICATION {stage.config.publication} FOR ALL TABLES")
    ruled(stage, {"ssn": rule}, tables=("public.users", "public.lost"), look_s=60.0)
    running = stage.start()
    wait_until(lambda: stage.state("public.lost") is TableState.STREAMING, "the table")
    stage.sql("INSERT INTO lost VALUES (20, 'open')")
    wait_until(lambda: len(records(stage, "lost")) == 1, "the record before")
    stage.sql("ALTER TABLE users ATTACH PARTITION lost FOR VALUES FROM (20) TO (30)")
    stage.sql(f"INSERT INTO users VALUES (21, '{SECRET}-3')")
    wait_until(lambda: len(records(stage, "lost")) == 2, "the record after")
    running.stop()
    nothing_leaked(stage)


def test_an_attached_table_whose_key_its_root_s_rule_excludes_is_set_aside(stage: Stage) -> None:
    stage.sql(*ROOT, "CREATE TABLE lost (id int PRIMARY KEY, ssn text NOT NULL UNIQUE)")
    stage.sql("ALTER TABLE lost REPLICA IDENTITY USING INDEX lost_ssn_key")
    stage.sql(f"CREATE PUBLICATION {stage.config.publication} FOR ALL TABLES")
    ruled(stage, {"ssn": Rule.EXCLUDE}, tables=("public.users", "public.lost"), look_s=60.0)
    running = stage.start()
    wait_until(lambda: stage.state("public.lost") is TableState.STREAMING, "the table")
    stage.sql("ALTER TABLE users ATTACH PARTITION lost FOR VALUES FROM (20) TO (30)")
    stage.sql(f"INSERT INTO users VALUES (21, '{SECRET}-3')")
    wait_until(lambda: stage.state("public.lost") is TableState.QUARANTINED, "the refusal")
    running.stop()
    nothing_leaked(stage)

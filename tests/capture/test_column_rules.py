"""Columns whose values never leave the source: excluded, hashed and redacted in the stream and in copies."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.capture.beside import wait_until
from tests.capture.capture_stage import Stage

from millstream.capture.column_rules.binding import ColumnRules
from millstream.capture.source_table_checks import check_source
from millstream.catalog import TableState
from millstream.errors import ConfigError, MillstreamError, UnknownTable
from millstream.model.column_rules import Rule, SourceRules
from millstream.model.ids import StreamId

KEY = b"0123456789abcdef"
RULES = {"ssn": Rule.EXCLUDE, "email": Rule.HASH, "name": Rule.REDACT}
TABLE = "CREATE TABLE users (id int PRIMARY KEY, ssn text, email text, name text, age int)"


def digest(text: str) -> str:
    return hmac.new(KEY, text.encode(), hashlib.sha256).hexdigest()


def ruled(stage: Stage, rules: Mapping[str, Rule] = RULES, table: str = "users", **more: Any) -> None:
    """Set rules of one table of the schema public."""
    named = SourceRules({("public", table): rules}, KEY)
    stage.config = replace(stage.config, rules=named, **more)


def records(stage: Stage, table: str = "users") -> list[dict[str, Any]]:
    """Return a table's records, with the letters of their operations."""
    found = [(rows.schema.name, row) for rows, _, row in stage.log.records()]
    return [row | {"__op": chr(row["__op"])} for name, row in found if name == table]


def holds(folder: Path, *secrets: str) -> list[str]:
    """Return the files below a folder that have one of the texts in them, with the text."""
    files = [(path, path.read_bytes()) for path in folder.rglob("*") if path.is_file()]
    return [f"{path}: {secret}" for path, data in files for secret in secrets if secret.encode() in data]


def test_rules_hold_in_copies_and_in_changes(stage: Stage) -> None:
    stage.sql(
        TABLE,
        "INSERT INTO users VALUES (1, 'ssn-1', 'a\\b' || chr(9) || chr(10), 'Ann', 30), (2, NULL, NULL, NULL, NULL)",
    )
    ruled(stage)
    stage.catch_up()
    stage.sql(
        "INSERT INTO users VALUES (3, 'ssn-3', 'c@x', 'Cid', 33)",
        "UPDATE users SET email = 'd@x', ssn = 'ssn-4' WHERE id = 3",
        "UPDATE users SET id = 4 WHERE id = 3",
        "DELETE FROM users WHERE id = 4",
    )
    stage.catch_up()
    found = [{n: v for n, v in row.items() if not n.startswith("__")} for row in records(stage)]
    assert found[:4] == [
        {"id": "1", "email": digest("a\\b\t\n"), "name": "[redacted]", "age": "30"},
        {"id": "2", "email": None, "name": None, "age": None},
        {"id": "3", "email": digest("c@x"), "name": "[redacted]", "age": "33"},
        {"id": "3", "email": digest("d@x"), "name": "[redacted]", "age": "33"},
    ]
    assert not holds(stage.folder, "ssn-1", "ssn-3", "ssn-4", "c@x", "d@x", "Ann", "Cid")


def test_full_identity_has_rules_in_old_rows(stage: Stage) -> None:
    stage.sql(TABLE, "ALTER TABLE users REPLICA IDENTITY FULL", "INSERT INTO users VALUES (1, 's1', 'a@x', 'Ann', 30)")
    ruled(stage)
    stage.catch_up()
    stage.sql("UPDATE users SET email = 'b@x', name = 'Bob'", "DELETE FROM users")
    stage.catch_up()
    texts = repr(records(stage))
    assert digest("a@x") in texts
    assert digest("b@x") in texts
    assert not any(secret in texts for secret in ("a@x", "b@x", "Ann", "Bob", "s1"))


def test_a_hashed_key_is_copied_without_its_values(stage: Stage) -> None:
    stage.sql(
        "CREATE TABLE users (email text PRIMARY KEY, age int)",
        "INSERT INTO users SELECT 'secret' || n, n FROM generate_series(1, 200) n",
    )
    ruled(stage, {"email": Rule.HASH})
    stage.catch_up()
    stage.sql(
        "UPDATE users SET age = 0 WHERE age = 7",
        "DELETE FROM users WHERE age = 8",
        "UPDATE users SET email = 'secretx' WHERE age = 9",
    )
    stage.catch_up()
    copied = [row for row in records(stage) if row["__op"] == "r"]
    assert {row["email"] for row in copied} == {digest(f"secret{n}") for n in range(1, 201)}
    changed = [(row["__op"], row["email"]) for row in records(stage) if row["__op"] not in {"r", "t"}]
    assert ("u", digest("secret7")) in changed
    assert ("d", digest("secret8")) in changed
    assert digest("secret9") in repr(records(stage)[-1])
    assert "secret" not in repr(records(stage))
    assert not holds(stage.folder, "secret1", "secret7", "secretx")


@pytest.mark.long
def test_a_large_transaction_spills_without_the_values(stage: Stage) -> None:
    stage.sql(TABLE)
    ruled(stage, buffer_bytes_max=64 << 10)
    stage.catch_up()
    stage.log.gate.clear()
    running = stage.start()
    stage.sql(
        "INSERT INTO users SELECT n, 'ssn-secret', 'mail-secret', 'name-secret', n FROM generate_series(1, 30000) n"
    )
    wait_until(lambda: stage.log.held() > 0, "the large transaction to be submitted")
    assert any(path.stat().st_size for path in (stage.folder / "spill").rglob("*.messages"))
    assert not holds(stage.folder, "ssn-secret", "mail-secret", "name-secret")
    stage.log.gate.set()
    running.stop()
    assert len(records(stage)) == 30_000
    assert {row["email"] for row in records(stage)} == {digest("mail-secret")}


def test_values_that_are_not_sent_are_redacted_too(stage: Stage) -> None:
    stage.sql(TABLE, "ALTER TABLE users ALTER name SET STORAGE EXTERNAL, ALTER email SET STORAGE EXTERNAL")
    ruled(stage)
    stage.catch_up()
    stage.sql("INSERT INTO users VALUES (1, 's', repeat('e', 9000), repeat('n', 9000), 1)", "UPDATE users SET age = 2")
    stage.catch_up()
    first, second = records(stage)
    assert first["email"] == digest("e" * 9000)
    assert second["name"] == "[redacted]"
    assert second["__unchanged"] == ["email"]


def test_a_new_rule_copies_again_and_fills_nothing_from_before(stage: Stage) -> None:
    stage.sql(
        TABLE,
        "ALTER TABLE users ALTER email SET STORAGE EXTERNAL",
        "INSERT INTO users VALUES (1, 's', repeat('e', 9000), 'n', 1)",
    )
    stage.catch_up()
    stage.sql("UPDATE users SET age = 2")
    ruled(stage)
    before = len(records(stage))
    stage.catch_up()
    later = records(stage)[before:]
    assert [row["__op"] for row in later if row["__op"] in {"t", "r"}] == ["t", "r"]
    assert all(not row["__unchanged"] for row in later)
    assert later[-1]["email"] == digest("e" * 9000)
    stage.sql("UPDATE users SET age = 3")
    stage.catch_up()
    assert records(stage)[-1]["__unchanged"] == ["email"]


@pytest.mark.parametrize("name_in_file", ["ssn", "social"])
def test_rules_follow_a_renamed_column(stage: Stage, name_in_file: str) -> None:
    stage.sql(TABLE)
    ruled(stage, {"ssn": Rule.HASH})
    stage.catch_up()
    stage.sql(
        "INSERT INTO users VALUES (1, 'secret1', 'e', 'n', 1)",
        "ALTER TABLE users RENAME ssn TO social",
        "INSERT INTO users VALUES (2, 'secret2', 'e', 'n', 1)",
        "ALTER TABLE users ADD ssn text",
        "INSERT INTO users VALUES (3, 'secret3', 'e', 'n', 1, 'secret4')",
    )
    stage.catch_up()
    ruled(stage, {name_in_file: Rule.HASH})
    stage.sql("INSERT INTO users VALUES (4, 'secret5', 'e', 'n', 1, 'secret6')")
    stage.catch_up()
    texts = repr(records(stage))
    assert "secret" not in texts
    assert all(digest(f"secret{n}") in texts for n in range(1, 7))


def test_a_backlog_over_several_definitions_has_the_rules(stage: Stage) -> None:
    stage.sql(TABLE)
    ruled(stage, {"ssn": Rule.REDACT})
    stage.catch_up()
    stage.sql(
        "ALTER TABLE users RENAME ssn TO a",
        "INSERT INTO users VALUES (1, 'secret1', 'e', 'n', 1)",
        "ALTER TABLE users RENAME a TO b; ALTER TABLE users ADD more text; ALTER TABLE users DROP age",
        "INSERT INTO users VALUES (2, 'secret2', 'e', 'n', 'm')",
        "ALTER TABLE users RENAME b TO c; ALTER TABLE users ADD most text",
    )
    stage.catch_up()
    assert "secret" not in repr(records(stage))
    assert stage.state("public.users") is TableState.STREAMING


def test_an_unclear_layout_stores_nothing_and_is_copied_on_request(stage: Stage) -> None:
    stage.sql(TABLE)
    ruled(stage, {"ssn": Rule.REDACT})
    stage.catch_up()
    stage.sql(
        "ALTER TABLE users RENAME ssn TO a; ALTER TABLE users ADD x text",
        "ALTER TABLE users DROP email",
        "INSERT INTO users VALUES (1, 'secret1', 'n', 1, 'x')",
        "ALTER TABLE users DROP a; ALTER TABLE users RENAME name TO q; ALTER TABLE users ADD y text",
        "INSERT INTO users VALUES (2, 'n', 1, 'x', 'y')",
    )
    outcome = stage.catch_up()
    assert "layout_unclear" in outcome.quarantined["public.users"]
    assert "secret" not in repr(records(stage))
    stage.catalog.set_state(stage.table("public.users").id, TableState.COPY_REQUESTED)
    stage.catch_up()
    assert stage.state("public.users") is TableState.STREAMING
    assert {row["id"] for row in records(stage) if row["__op"] == "r"} == {"1", "2"}


def test_a_table_that_can_not_be_decoded_keeps_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    from millstream import failpoints

    stage.sql(TABLE)
    ruled(stage)
    stage.catch_up()
    monkeypatch.setattr(failpoints, "_left", failpoints._parse("capture.decode.public.users"))
    stage.sql("INSERT INTO users VALUES (1, 'secret', 'secret', 'secret', 1)")
    assert "public.users" in stage.catch_up().quarantined
    assert records(stage) == []
    stage.catalog.set_state(stage.table("public.users").id, TableState.COPY_REQUESTED)
    stage.catch_up()
    assert [row["__op"] for row in records(stage)] == ["t", "r"]
    assert "secret" not in repr(records(stage))


REFUSED = {
    "unknown_table": ("nothing", {"ssn": Rule.EXCLUDE}),
    "unknown_column": ("users", {"sn": Rule.EXCLUDE}),
    "key_not_excludable": ("users", {"id": Rule.REDACT}),
}


@pytest.mark.parametrize("code", REFUSED)
def test_a_rule_that_can_not_be_applied_stops_the_start(stage: Stage, code: str) -> None:
    table, rules = REFUSED[code]
    stage.sql(TABLE)
    ruled(stage, rules, table)
    before = ColumnRules(None, StreamId(UUID(int=0)), stage.config.rules)
    (found,) = (one for one in check_source(stage.config, before) if one.code == code)
    assert found.blocks == "source", "doctor finds it before the first run"
    with pytest.raises((UnknownTable, ConfigError)) as caught:
        stage.catch_up()
    assert (caught.value.code, caught.value.exit_code) == (code, 2)
    assert isinstance(caught.value, MillstreamError)
    assert stage.state("public.users") is None
    with stage.connect() as connection:
        assert connection.execute("SELECT count(*) FROM pg_publication").fetchone() == (0,)


def test_a_rule_that_fails_later_quarantines_its_table(stage: Stage) -> None:
    stage.sql(TABLE)
    ruled(stage)
    running = stage.start()
    wait_until(lambda: stage.state("public.users") is TableState.STREAMING, "the copy")
    stage.sql(
        "ALTER TABLE users ALTER name SET NOT NULL; ALTER TABLE users DROP CONSTRAINT users_pkey, ADD PRIMARY KEY (id, name)"
    )
    stage.sql("INSERT INTO users VALUES (1, 's', 'e', 'secret', 1)")
    wait_until(lambda: stage.state("public.users") is TableState.QUARANTINED, "the refusal")
    assert stage.table("public.users").reason.startswith("key_not_excludable")
    stage.sql("ALTER TABLE users DROP CONSTRAINT users_pkey, ADD PRIMARY KEY (id)")
    wait_until(lambda: stage.state("public.users") is TableState.STREAMING, "the copy after the mend")
    running.stop()
    assert "secret" not in repr(records(stage))


def test_partitions_have_their_root_s_rules(stage: Stage) -> None:
    stage.sql(
        "CREATE TABLE users (id int PRIMARY KEY, ssn text) PARTITION BY RANGE (id)",
        "CREATE TABLE low PARTITION OF users FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE high (ssn text, id int NOT NULL); ALTER TABLE users ATTACH PARTITION high FOR VALUES FROM (10) TO (20)",
        "INSERT INTO users VALUES (1, 'secret1'), (11, 'secret2')",
    )
    ruled(stage, {"ssn": Rule.HASH})
    stage.catch_up()
    stage.sql("INSERT INTO users VALUES (2, 'secret3'), (12, 'secret4')", "UPDATE users SET id = id + 5")
    stage.catch_up()
    texts = repr(records(stage))
    assert "secret" not in texts
    assert all(digest(f"secret{n}") in texts for n in range(1, 5))


def test_doctor_names_generated_columns_over_a_column_with_a_rule(stage: Stage) -> None:
    stage.sql(
        "CREATE TABLE users (id int PRIMARY KEY, ssn text, name text,"
        " short text GENERATED ALWAYS AS (left(ssn, 3)) STORED, kept text GENERATED ALWAYS AS (upper(ssn)) STORED,"
        " other text GENERATED ALWAYS AS (lower(name)) STORED)"
    )
    ruled(stage, {"ssn": Rule.EXCLUDE, "kept": Rule.HASH})
    (found,) = (f for f in check_source(stage.config) if f.code == "column_derived")
    assert found.message == "public.users.short has no rule and is generated from ssn, which has one"
    assert (found.table, found.blocks) == ("public.users", "nothing")

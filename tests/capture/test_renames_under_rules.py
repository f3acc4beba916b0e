"""Renamed columns of tables with rules: by a definition, as in other tables, if no record has a value that a rule keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.capture.beside import wait_until
from tests.capture.capture_stage import Stage
from tests.capture.test_column_numbers import ops
from tests.capture.test_column_rules import TABLE, digest, records, ruled
from tests.capture.test_rule_leaks import SECRET, nothing_leaked

from millstream.catalog import TableState
from millstream.model.column_rules import Rule

RULES = {"ssn": Rule.EXCLUDE, "email": Rule.HASH, "name": Rule.REDACT}
ROW = f"INSERT INTO users VALUES (1, '{SECRET}-1', '{SECRET}-2', '{SECRET}-3', 30)"


def insert(id_: int, *more: str) -> str:
    """Return a statement that inserts a row, with secrets in the columns that have rules from the start."""
    values = [f"'{SECRET}-{id_}'"] * 3 + ["31", *(f"'{text}'" for text in more)]
    return f"INSERT INTO users VALUES ({id_}, {', '.join(values)})"


@pytest.fixture
def following(stage: Stage) -> Stage:
    stage.sql(TABLE, ROW)
    ruled(stage, RULES, follows_names=True)
    stage.catch_up()
    return stage


def swapped(one: str, other: str) -> str:
    names = ((one, "spare"), (other, one), ("spare", other))
    return "BEGIN; " + "".join(f"ALTER TABLE users RENAME {old} TO {new}; " for old, new in names) + "COMMIT"


TOLD: dict[str, tuple[Sequence[str], dict[str, str]]] = {
    "a column without a rule": (["ALTER TABLE users RENAME age TO years"], {"age": "years"}),
    "a hashed column": (["ALTER TABLE users RENAME email TO mail"], {"email": "mail"}),
    "a redacted column": (["ALTER TABLE users RENAME name TO called"], {"name": "called"}),
    "a hashed and another column": (
        ["ALTER TABLE users RENAME email TO mail", "ALTER TABLE users RENAME age TO years"],
        {"email": "mail", "age": "years"},
    ),
    "an excluded and another column": (
        ["ALTER TABLE users RENAME ssn TO social", "ALTER TABLE users RENAME age TO years"],
        {"age": "years"},
    ),
    "one transaction with a row": (
        [f"BEGIN; ALTER TABLE users RENAME email TO mail; {insert(2)}; COMMIT"],
        {"email": "mail"},
    ),
    "rows around": (
        [insert(2), "ALTER TABLE users RENAME email TO mail", insert(3), "ALTER TABLE users RENAME mail TO post", insert(4)],
        {"email": "post"},
    ),
    "and a column under the old name": (
        ["ALTER TABLE users RENAME email TO mail; ALTER TABLE users ADD email text", insert(2, f"{SECRET}-9")],
        {"email": "mail"},
    ),
}  # fmt: skip


QUICK = {"an excluded and another column", "rows around", "an excluded and a plain one", "for a while"}


@pytest.mark.parametrize(
    ("case", "is_live"),
    [
        *(pytest.param(case, False, marks=() if case in QUICK else pytest.mark.long) for case in TOLD),
        pytest.param("one transaction with a row", True, marks=pytest.mark.long),
        ("and a column under the old name", True),
    ],
)
def test_a_rename_in_a_table_with_rules_is_told_and_copies_nothing(
    following: Stage, case: str, *, is_live: bool
) -> None:
    stage, (statements, renamed) = following, TOLD[case]
    if is_live:
        capture = stage.start()
        wait_until(stage.slot_active, "it streams")
        stage.sql(*statements)
        wait_until(lambda: "s" in ops(stage), "the definition")
        capture.stop()
    else:
        stage.sql(*statements)
    stage.catch_up()
    assert ops(stage).count("r") == 1
    found = [dict(row["__before"] or ()) for _, _, row in stage.log.records() if chr(row["__op"]) == "s"]
    assert renamed.items() <= {old: new for one in found for old, new in one.items()}.items()
    assert all("ssn" not in one for one in found)
    assert stage.state("public.users") is TableState.STREAMING
    stage.sql("INSERT INTO users (id) VALUES (99)")
    stage.catch_up()
    assert ops(stage).count("r") == 1
    nothing_leaked(stage)


def test_the_rename_of_an_excluded_column_tells_nothing(following: Stage) -> None:
    following.sql("ALTER TABLE users RENAME ssn TO social", insert(2))
    following.catch_up()
    following.sql("ALTER TABLE users RENAME social TO ssn", insert(3))
    following.catch_up()
    assert ops(following) == ["r", "c", "c"]
    nothing_leaked(following)


def test_a_new_type_of_an_excluded_column_copies_nothing(following: Stage) -> None:
    following.sql("ALTER TABLE users ALTER ssn TYPE varchar(99)", "ALTER TABLE users ALTER ssn TYPE bytea USING NULL")
    following.catch_up()
    assert ops(following) == ["r"]


COPIED: dict[str, Sequence[str]] = {
    "a hashed and a plain one": [swapped("email", "age")],
    "an excluded and a plain one": [swapped("ssn", "age")],
    "for a while": ["ALTER TABLE users ADD nick text", swapped("email", "nick"), insert(2, "open"), swapped("email", "nick")],
    "an excluded and a plain one for a while, which records lack then": [
        "ALTER TABLE users ADD nick text", swapped("ssn", "age"),
        f"INSERT INTO users (id, ssn, age, nick) VALUES (2, 7, '{SECRET}-4', 'open')", swapped("ssn", "age"),
    ],
    "a new column that gets a hashed one's name": [
        "ALTER TABLE users ADD nick text", insert(2, "open"), "ALTER TABLE users RENAME email TO mail",
        "ALTER TABLE users RENAME nick TO email",
    ],
    "a new column under a hashed one's name for a while": [
        "ALTER TABLE users RENAME email TO mail", "ALTER TABLE users ADD email text", insert(2, f"{SECRET}-9"),
        "ALTER TABLE users RENAME email TO later",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.long) for case in COPIED]
)
def test_names_that_pass_between_columns_with_and_without_a_rule_are_copied(following: Stage, case: str) -> None:
    """The column without one gets it with the name, so its older values have to go."""
    following.sql(*COPIED[case])
    following.catch_up()
    following.catch_up()
    assert following.state("public.users") is TableState.STREAMING
    assert ops(following).count("r") > 1
    nothing_leaked(following)


@pytest.mark.sampled
@pytest.mark.parametrize("is_looked_at", [False, True])
def test_a_new_column_under_a_later_name_of_a_hashed_one_keeps_the_rule(
    following: Stage, *, is_looked_at: bool
) -> None:
    following.sql("ALTER TABLE users RENAME email TO mail")
    following.catch_up()
    following.sql("ALTER TABLE users RENAME mail TO post; ALTER TABLE users ADD mail text", insert(2, f"{SECRET}-9"))
    if is_looked_at:
        following.catch_up()
    following.sql("ALTER TABLE users RENAME mail TO later")
    following.catch_up()
    following.catch_up()
    assert digest(f"{SECRET}-9") in repr(records(following))
    nothing_leaked(following)


@pytest.mark.sampled
@pytest.mark.parametrize("key", ["PRIMARY KEY", ""])
def test_a_copy_that_reads_a_column_before_its_rule_is_known_begins_again(stage: Stage, key: str) -> None:
    """The rule shows in the stream alone, and the stream comes there after the read."""
    stage.sql(TABLE.replace("PRIMARY KEY", key), "ALTER TABLE users REPLICA IDENTITY FULL", ROW)
    changes = [*COPIED["a new column under a hashed one's name for a while"]]
    waited: list[str] = []

    def change(moment: str, _details: dict[str, object]) -> None:
        if moment in {"copy.fetch", "copy.snapshot"} and changes:
            stage.sql(*changes)
            changes.clear()
        elif moment == "look" and not changes and not waited:
            waited.append(moment)  # a look would have the copy begin again, too
            with contextlib.suppress(AssertionError):
                wait_until(lambda: "r" in ops(stage), "the rows", deadline_s=2.0)

    ruled(stage, RULES, on_moment=change, copy_workers=1, plain_turns=0)
    stage.catch_up()
    stage.catch_up()
    assert not changes
    assert stage.state("public.users") is TableState.STREAMING
    assert digest(f"{SECRET}-9") in repr(records(stage))
    nothing_leaked(stage)


def test_a_column_that_may_have_had_a_hashed_one_s_name_is_not_copied(following: Stage) -> None:
    following.sql(
        "ALTER TABLE users RENAME email TO mail", "ALTER TABLE users ADD email text", insert(2, f"{SECRET}-9"),
        "ALTER TABLE users DROP email", "ALTER TABLE users ADD later text",
    )  # fmt: skip
    following.catch_up()
    assert following.state("public.users") is TableState.QUARANTINED
    nothing_leaked(following)


def test_names_that_two_hashed_columns_swap_are_told(stage: Stage) -> None:
    stage.sql(TABLE, ROW)
    ruled(stage, {"ssn": Rule.HASH, "email": Rule.HASH, "name": Rule.HASH}, follows_names=True)
    stage.catch_up()
    stage.sql(swapped("ssn", "email"), insert(2))
    stage.catch_up()
    assert ops(stage).count("r") == 1
    (told,) = [dict(row["__before"]) for row in records(stage) if row["__op"] == "s"]
    assert told == {"ssn": "email", "email": "ssn"}
    nothing_leaked(stage)


def test_a_rename_of_which_a_killed_session_has_shown_records_is_told_by_the_next(following: Stage) -> None:
    stage = following
    stage.config = replace(stage.config)
    capture = stage.start()
    wait_until(stage.slot_active, "it streams")
    stage.sql("ALTER TABLE users RENAME email TO mail", insert(2))
    wait_until(lambda: "c" in ops(stage), "the row")
    capture.stop()
    stage.sql("ALTER TABLE users ADD email text", insert(3, f"{SECRET}-9"))
    stage.catch_up()
    stage.sql(f"UPDATE users SET age = 5, email = '{SECRET}-8'")
    stage.catch_up()
    assert ops(stage).count("r") == 1
    assert digest(f"{SECRET}-8") in repr(records(stage))
    nothing_leaked(stage)

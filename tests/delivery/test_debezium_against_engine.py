"""Our messages are those that Debezium's engine sent for the same statements, field by field.

Each difference is listed with its reason, and each listed difference must occur.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from tests.delivery.capturing import NOW_NS, Captured, captured, messages
from tests.delivery.golden_files import SOURCES, VARIANTS, golden

from millstream.delivery.kafka.debezium import DebeziumEncoder
from millstream.delivery.kafka.debezium_options import DebeziumOptions
from millstream.delivery.kafka.from_json import records_of
from millstream.model.ids import Epoch, ShardId
from millstream.model.record_json import record_facts, to_json
from millstream.testing.postgres import EmbeddedPostgres

LINE_MAX = 30_000
OF_THE_RUN = re.compile(r"\.(ts_ms|ts_us|ts_ns|lsn|txId|sequence)$")
"""Fields that differ between two runs: only their types are compared."""

WORKLOAD = {
    r"texts\..*\.nm$": "Debezium sends null for every `name`",
    r"others\..*\.(iv2|ov)$": "Debezium sends empty arrays for every `int2vector` and `oidvector`",
    r"users\..*\.m\.(name|version|parameters)$": "the log doesn't tell an enum from other types of the user",
    r"users\..*\.ma(\.items|\.type)?$": "the log doesn't tell an array of the user's from other types of the user",
    r"users\..*\.po(\.type)?$": "the log doesn't know a domain's base type",
    r"users\..*\.pr$": "the log doesn't tell a composite, which Debezium leaves out, from other types of the user",
    r"required\..*\.(default|optional)$": "the log knows neither defaults nor NOT NULL",
    r"required\..*\.(d|m)$": "Debezium sends the default for a null",
    r"more\..*\.b5$": "Debezium sends a null for every array of bits",
    r"more\..*\.tz\[0\]$": "Debezium cuts the fraction of a timetz in an array",
    r"odd_name\._": "Debezium sanitizes each byte of a name that isn't ASCII, and loses the key of its table",
}
VARIANT = {
    "flat": {
        r"^(keyed|keyless|whole|toast|stamped)\.value$": "Debezium's JSON wraps a tombstone in its schema",
    },
    "string": {
        r"toast\..*\.bytes$": "Debezium sends null for an unchanged `bytea` that is text: no one could tell it from NULL",
        r"toasts\..*\.(by|n52)$": "the same for arrays",
    },
    "isostring": {
        r"toast\..*\.bytes$": "as for `string`",
        r"toasts\..*\.by$": "as for `string`",
    },
}
EDGES = {
    r"edges\..*\.n2$": "Debezium sends null for an array of numerics with a NaN",
    r"edges\..*\.da\[0\]$": "Debezium sends another number for an infinite date in an array",
}
EDGES_VARIANT = {
    name: {r"edges\..*\.ts$": "beyond 64 bits of microseconds both wrap, Debezium from nanoseconds"}
    for name in ("default", "string", "microseconds")
}


@pytest.fixture(scope="module")
def changes(postgres_server: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Captured]:
    """Return the records of each workload."""
    found = captured(postgres_server, tmp_path_factory.mktemp("debezium"), *SOURCES)
    edges = [change for change in found if change[0].name == "edges"]
    return {"workload": [change for change in found if change[0].name != "edges"], "edges": edges}


def options(variant: str) -> DebeziumOptions:
    facts: dict[str, Any] = {"skipped_operations": "t"}  # Debezium's own default
    for name, value in VARIANTS[variant].items():
        if name.startswith("transforms"):
            facts["format"] = "debezium-flat"
        else:
            facts[name.replace(".", "_")] = {"true": True, "false": False}.get(value, value)
    return DebeziumOptions(**facts)


def differences(path: str, theirs: Any, ours: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the places where two JSON values differ; fields of a schema are compared by name.

    Fields of a key have the order of the table's columns in ours, that of the primary key in theirs.
    """
    if OF_THE_RUN.search(path):
        if type(theirs) is not type(ours):
            yield path, theirs, ours
    elif isinstance(theirs, dict) and isinstance(ours, dict):
        for name in theirs.keys() | ours.keys():
            if name in theirs and name in ours:
                yield from differences(f"{path}.{name}", theirs[name], ours[name])
            else:
                yield f"{path}.{name}", theirs.get(name, "(none)"), ours.get(name, "(none)")
    elif is_fields(theirs) and is_fields(ours):
        yield from differences(path, {f["field"]: f for f in theirs}, {f["field"]: f for f in ours})
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for number, (their, our) in enumerate(zip(theirs, ours, strict=True)):
            yield from differences(f"{path}[{number}]", their, our)
    elif type(theirs) is not type(ours) or theirs != ours:
        yield path, theirs, ours


def reasons_of(name: str, theirs: Any, ours: Any, allowed: Iterable[str]) -> set[str]:
    """Return the patterns of the differences between two messages of a table; fail if one isn't allowed."""
    used = set()
    for path, theirs_here, ours_here in differences(name, theirs, ours):
        if path.endswith(".f4") and struct.pack("f", theirs_here) == struct.pack("f", ours_here):
            continue  # Java's shortest digits of a float have one more at times
        reasons = [pattern for pattern in allowed if re.search(pattern, path)]
        assert reasons, f"{path}: Debezium has {theirs_here!r}, we have {ours_here!r}"
        used.update(reasons)
    return used


def is_fields(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "field" in value[0]


def by_topic(found: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return messages by the last parts of their topics, without the rows that the golden files leave out."""
    topics: dict[str, list[dict[str, Any]]] = {}
    for message in found:
        after = ((message["value"] or {}).get("payload") or {}).get("after", (message["value"] or {}).get("payload"))
        is_large = "toast" in message["topic"] and len(json.dumps(after)) > LINE_MAX
        if not is_large:
            name = message["topic"].removeprefix("golden.").removeprefix("public.").replace("__", "_")
            topics.setdefault(name, []).append(message)
    return topics


@pytest.mark.parametrize(("source", "variant"), [(s, v) for s, variants in SOURCES.items() for v in variants])
def test_our_messages_are_those_of_debezium(changes: dict[str, Captured], source: str, variant: str) -> None:
    theirs = by_topic(golden(source, variant))
    ours = by_topic(messages(changes[source], options(variant), source))
    assert {name: len(found) for name, found in theirs.items()} == {name: len(found) for name, found in ours.items()}
    allowed = WORKLOAD | VARIANT.get(variant, {}) if source == "workload" else EDGES | EDGES_VARIANT.get(variant, {})
    used = set()
    for name, found in theirs.items():
        for their, our in zip(found, ours[name], strict=True):
            used.update(reasons_of(name, their, our, allowed))
    assert used == set(allowed), "a difference that is listed doesn't occur"


def test_the_time_of_an_event_is_that_of_its_sending_and_of_its_source_that_of_its_commit(
    changes: dict[str, Captured],
) -> None:
    found = [m["value"]["payload"] for m in messages(changes["workload"], options("default")) if m["value"]]
    assert all(payload["ts_ms"] == NOW_NS // 1_000_000 for payload in found)
    assert all(payload["ts_ns"] == NOW_NS for payload in found if payload["op"] != "m")
    for payload in found:
        source = payload["source"]
        assert (source["ts_us"], source["ts_ns"]) == (source["ts_ns"] // 1000, source["ts_us"] * 1000)
        assert source["ts_ms"] == source["ts_us"] // 1000
        assert json.loads(source["sequence"])[1] == str(source["lsn"])


@pytest.mark.parametrize("source", ["workload", "edges"])
def test_records_made_of_their_json_give_the_same_messages(changes: dict[str, Captured], source: str) -> None:
    """Dead letters, rows of a backfill and newest states of keys are there as JSON alone."""
    encoder = DebeziumEncoder("golden", "db", DebeziumOptions())
    for schema, batch in changes[source]:
        facts = record_facts(schema, batch, stream="golden", shard=ShardId(0), epoch=Epoch(1))
        made = records_of(schema, [json.loads(to_json(one)) for one in facts], None)
        assert encoder.encode(schema, made, now_ns=NOW_NS) == encoder.encode(schema, batch, now_ns=NOW_NS)

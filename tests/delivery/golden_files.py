"""The golden files: what Debezium's engine sent, and its workloads as statements. `golden/README.md` tells how they were made."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DATA = HERE / "data"
WORKLOADS = HERE / "golden"
VARIANTS: dict[str, dict[str, str]] = {
    "default": {},
    "flat": {
        "skipped.operations": "none",
        "transforms": "unwrap",
        "transforms.unwrap.type": "io.debezium.transforms.ExtractNewRecordState",
    },
    "string": {
        "decimal.handling.mode": "string",
        "skipped.operations": "none",
        "time.precision.mode": "adaptive_time_microseconds",
        "binary.handling.mode": "base64",
        "interval.handling.mode": "string",
    },
    "double": {
        "decimal.handling.mode": "double",
        "time.precision.mode": "connect",
        "binary.handling.mode": "hex",
        "tombstones.on.delete": "false",
        "skipped.operations": "t,u",
    },
    "isostring": {"time.precision.mode": "isostring", "binary.handling.mode": "base64-url-safe"},
    "microseconds": {"time.precision.mode": "microseconds"},
    "nanoseconds": {"time.precision.mode": "nanoseconds"},
}
"""Names of the sets of options, with Debezium's properties."""
SOURCES = {
    "workload": list(VARIANTS),
    "edges": ["default", "string", "double", "isostring", "microseconds", "nanoseconds"],
}

"""Names of the workloads, with the sets of options that read them."""


def transactions(source: str) -> tuple[list[list[str]], list[list[str]]]:
    """Return a workload's transactions, each a list of statements: those before and those after `-- from here`."""
    parts: tuple[list[list[str]], list[list[str]]] = ([], [])
    into, together = parts[0], None
    for line in (WORKLOADS / f"{source}.sql").read_text(encoding="utf-8").splitlines():
        if line == "-- from here":
            into = parts[1]
        elif line == "BEGIN":
            together = list[str]()
        elif line == "COMMIT":
            into.append(together or [])
            together = None
        elif line and not line.startswith("--"):
            if together is None:
                into.append([line])
            else:
                together.append(line)
    return parts


def run(connection: Any, workload: list[list[str]]) -> None:
    """Run transactions one after the other."""
    for transaction in workload:
        with connection.transaction():
            for statement in transaction:
                connection.execute(statement)


def golden(source: str, variant: str) -> list[dict[str, Any]]:
    """Return Debezium's messages, each with its schema blocks."""
    name = f"{source}_{variant}"
    schemas = [json.loads(line) for line in (DATA / f"{name}.schemas.ndjson").read_text(encoding="utf-8").splitlines()]

    def whole(part: Any) -> Any:
        return None if part is None else {"schema": schemas[part["schema"]], "payload": part["payload"]}

    messages = []
    for line in (DATA / f"{name}.ndjson").read_text(encoding="utf-8").splitlines():
        message = json.loads(line)
        message["key"], message["value"] = whole(message["key"]), whole(message["value"])
        headers = message["headers"].items()
        message["headers"] = {h: _in_header(whole(v)) for h, v in headers if not h.startswith("__debezium.context.")}
        messages.append(message)
    return messages


def _in_header(part: Any) -> dict[str, Any]:
    """Return a struct as a Connect worker puts it into a header by default; the engine sends it like a key."""
    found = {}
    for schema in part["schema"]["fields"]:
        value = part["payload"][schema["field"]]
        if schema.get("name") == "org.apache.kafka.connect.data.Decimal":
            value = int.from_bytes(b64decode(value), "big", signed=True) / 10 ** int(schema["parameters"]["scale"])
        found[schema["field"]] = value
    return found

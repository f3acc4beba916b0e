"""Make the golden files again: Debezium's engine reads a PostgreSQL server of the tests. See README.md."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.delivery.golden_files import DATA, SOURCES, VARIANTS, run, transactions

from millstream.testing.postgres import EmbeddedPostgres

_LINE_MAX = 30_000
"""Longer lines (the rows that are inserted into tables for TOAST) are left out of the golden files."""
HERE = Path(__file__).parent


def properties(server: EmbeddedPostgres, database: str, name: str, output: Path, extra: dict[str, str]) -> str:
    entries = {
        "name": name,
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "offset.storage": "org.apache.kafka.connect.storage.MemoryOffsetBackingStore",
        "offset.flush.interval.ms": "1000",
        "database.hostname": "127.0.0.1",
        "database.port": str(server.port),
        "database.user": "postgres",
        "database.password": "x",
        "database.dbname": database,
        "topic.prefix": "golden",
        "plugin.name": "pgoutput",
        "slot.name": name,
        "publication.name": "golden",
        "publication.autocreate.mode": "disabled",
        "snapshot.mode": "no_data",
        "golden.output": str(output),
        **extra,
    }
    return "".join(f"{key}={value}\n" for key, value in entries.items())


def main(jars: str) -> None:
    with tempfile.TemporaryDirectory() as folder, EmbeddedPostgres(tcp=True).start() as server:
        files = []
        for source, variants in SOURCES.items():
            before, after = transactions(source)
            server.create_database(source)
            with server.connect(source, autocommit=True) as connection:
                run(connection, before)
                connection.execute("CREATE PUBLICATION golden FOR ALL TABLES")
                names = [f"{source}_{variant}" for variant in variants]
                for name in names:
                    connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (name,))
                run(connection, after)
                connection.execute("SELECT pg_logical_emit_message(true, 'golden-end', 'x')")
            for name, variant in zip(names, variants, strict=True):
                file = Path(folder) / f"{name}.properties"
                file.write_text(properties(server, source, name, Path(folder) / f"{name}.ndjson", VARIANTS[variant]))
                files.append(file)
        command = ["java", "-Xmx512m", "-Dfile.encoding=UTF-8", "-cp", f"{jars}/*", str(HERE / "DebeziumGolden.java")]
        subprocess.run([*command, *map(str, files)], check=True)
        for file in files:
            shrink(file.with_suffix(".ndjson"), DATA)


def shrink(file: Path, folder: Path) -> None:
    """Write a run's lines with each schema block replaced by its number, and the blocks, one a line."""
    schemas: dict[str, int] = {}

    def number(value: object) -> object:
        if isinstance(value, dict) and set(value) == {"schema", "payload"}:
            text = json.dumps(value["schema"], ensure_ascii=False, separators=(",", ":"))
            return {"schema": schemas.setdefault(text, len(schemas)), "payload": value["payload"]}
        return value

    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if len(line) > _LINE_MAX:
            continue
        record = json.loads(line)
        for part in ("key", "value"):
            record[part] = number(record[part])
        record["headers"] = {name: number(value) for name, value in record["headers"].items()}
        lines.append(json.dumps(record, ensure_ascii=False, separators=(",", ":")))
    folder.mkdir(exist_ok=True)
    (folder / file.name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    (folder / f"{file.stem}.schemas.ndjson").write_text("".join(s + "\n" for s in schemas), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])

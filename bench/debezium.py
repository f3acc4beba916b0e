"""Debezium's embedded engine as a peer: it reads a slot, and a small class of ours fsyncs its JSON a batch.

It comes from Maven through pip's `jgo`, pinned jar by jar (`java/debezium.txt`). ECJ compiles the class,
because a Java from pip has no compiler. The engine connects to PostgreSQL over TCP only. Its start takes
seconds, which aren't counted: a run lasts from when its slot is taken until the last row is on disk.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.figures import say
from bench.source import DATABASE, Backlog
from millstream.spark.java import find_java
from millstream.testing._servers.maven import fetch

VERSION: Final = "3.6.1.Final"
_JAVA: Final = Path(__file__).parent / "java"
JARS: Final = _JAVA / "debezium.txt"
"""The engine's jars and those of Kafka Connect: a line each."""
_CLASS: Final = "DebeziumToFile"
_COMPILER: Final = ("org.eclipse.jdt", "ecj", "3.42.0")
_COMPILER_SHA256: Final = "29f6d3918ee02db4400c103bc25dd90a22491c3a395867d9393070cb96a7dd29"
_GIVE_UP_S: Final = 600.0
_LOOK_S: Final = 0.005

PROPERTIES: Final = {
    "name": "bench",
    "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
    # No stored offset: it begins at the slot's position. Only the slot sees its confirmations.
    "offset.storage": "org.apache.kafka.connect.storage.MemoryOffsetBackingStore",
    "offset.flush.interval.ms": "1000",
    "topic.prefix": "bench",
    "plugin.name": "pgoutput",
    "publication.autocreate.mode": "disabled",
    "slot.drop.on.stop": "false",
    "snapshot.mode": "no_data",
    # Otherwise it drops a TRUNCATE.
    "skipped.operations": "none",
    # A record's schema isn't written with each record: the leaner of its two forms.
    "converter.schemas.enable": "false",
    # Four times the default: fewer fsyncs, and room for both of its threads.
    "max.batch.size": "8192",
    "max.queue.size": "32768",
    "poll.interval.ms": "50",
}
"""The engine's properties, except the server's address."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Rate of one run in rows a second."""

    whole: float
    second_half: float
    """Rate of the second half of the rows: the engine's code is compiled by then."""


class Engine:
    """A compiled driver with the engine's jars; `engine` makes it."""

    def __init__(self, java: Path, class_path: str) -> None:
        self._java = java
        self._class_path = class_path

    def run(self, backlog: Backlog, folder: Path) -> Rates:
        """Read the backlog into an empty folder over a copy of its slot. The server listens on TCP."""
        with backlog.copied_slot() as slot:
            properties = PROPERTIES | {
                "database.hostname": "127.0.0.1",
                "database.port": str(backlog.server.port),
                "database.user": "postgres",
                "database.password": "none",
                "database.dbname": DATABASE,
                "publication.name": backlog.publication,
                "slot.name": slot,
            }
            settings = folder / "engine.properties"
            settings.write_text("".join(f"{key}={value}\n" for key, value in properties.items()))
            command = [str(self._java), "-cp", self._class_path, _CLASS, str(settings)]
            command += [str(folder / "changes.ndjson"), str(backlog.rows)]
            with (folder / "messages").open("w+") as messages:
                with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=messages, text=True) as process:
                    reaper = threading.Timer(_GIVE_UP_S, process.kill)
                    reaper.start()
                    try:
                        began_at = _taken_at(backlog, slot, process)
                        halfway_at, halfway, ended_at, rows = _watched(process, backlog.rows)
                    finally:
                        reaper.cancel()
                        process.kill()
                if rows < backlog.rows:
                    messages.seek(0)
                    raise RuntimeError(f"Debezium ended with {rows} of {backlog.rows} rows:\n{messages.read()[-4000:]}")
        return Rates(rows / (ended_at - began_at), (rows - halfway) / (ended_at - halfway_at))


def _taken_at(backlog: Backlog, slot: str, process: subprocess.Popen[str]) -> float:
    """Return the moment at which the slot is first read."""
    query = "SELECT active FROM pg_replication_slots WHERE slot_name = %s"
    with backlog.server.connect(DATABASE) as connection:
        while connection.execute(query, [slot]).fetchone() != (True,) and process.poll() is None:
            time.sleep(_LOOK_S)
    return time.perf_counter()


def _watched(process: subprocess.Popen[str], wanted: int) -> tuple[float, int, float, int]:
    """Return when half of the rows were on disk, how many that were, when the last one was, and how many."""
    assert process.stdout is not None
    halfway_at, halfway, ended_at, rows = 0.0, 0, 0.0, 0
    for line in process.stdout:
        ended_at, rows = time.perf_counter(), int(line)
        if not halfway and rows >= wanted // 2:
            halfway_at, halfway = ended_at, rows
    return halfway_at, halfway, ended_at, rows


@contextmanager
def engine() -> Iterator[Engine]:
    """Fetch the jars, and compile; the first time takes a minute.

    Raises:
        ArtifactUnavailable: a jar can't be fetched.
        EngineError (`java_missing`): no Java 17 or newer.
    """
    with tempfile.TemporaryDirectory() as made:
        say("  Debezium's jars")
        java = find_java(Path(made)).java
        jars = [
            fetch(group, artifact, version, sha256=digest)
            for group, artifact, version, digest in (
                line.split() for line in JARS.read_text().splitlines() if not line.startswith("#")
            )
        ]
        compiler = fetch(*_COMPILER, sha256=_COMPILER_SHA256)
        class_path = os.pathsep.join(map(str, jars))
        subprocess.run(
            [str(java), "-jar", str(compiler), "-17", "-cp", class_path, "-d", made, str(_JAVA / f"{_CLASS}.java")],
            check=True,
        )
        yield Engine(java, os.pathsep.join([made, class_path]))

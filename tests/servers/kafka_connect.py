"""A worker of Kafka Connect for tests and benchmarks: standalone, with the connectors that its jars contain."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from millstream.spark.java import find_java
from millstream.testing._servers.maven import cache_dir, fetch
from millstream.testing._servers.ports import free_port
from millstream.testing._servers.processes import EmbeddedServer, ServerProcess
from millstream.testing.kafka import JARS

_STARTS_WITHIN_S: Final = 120.0
_JAVA_OPTIONS: Final = ("-Dlog4j2.level=WARN", "-Duser.timezone=UTC")
_WORKER: Final = {
    "key.converter": "org.apache.kafka.connect.json.JsonConverter",
    "value.converter": "org.apache.kafka.connect.json.JsonConverter",
    "offset.flush.interval.ms": "1000",
    # Connectors are on the class path: no folder is scanned.
    "plugin.discovery": "service_load",
}


class KafkaConnect(EmbeddedServer):
    """A standalone worker.

    Args:
        folder: for its settings, its offsets and its log.
        servers: the brokers.
        connectors: properties of each connector by its name.
        jars: lines of group, artifact, version and SHA-256: Connect's runtime, its JSON converter, and the connectors'
            own jars.
        worker: more of the worker's properties.
        memory: bound of Java's heap.
    """

    def __init__(
        self,
        folder: Path,
        *,
        servers: str,
        connectors: Mapping[str, Mapping[str, str]],
        jars: Sequence[str],
        worker: Mapping[str, str] | None = None,
        memory: str = "512m",
    ) -> None:
        super().__init__(folder)
        self._servers = servers
        self._connectors = connectors
        self._jars = jars
        self._worker = {} if worker is None else worker
        self._memory = memory
        self._port = free_port()

    def start(self) -> None:
        """Start it and return once all tasks run. `ArtifactUnavailable` without its jars, `java_missing` without Java."""
        self._folder.mkdir(parents=True, exist_ok=True)
        worker = {
            "bootstrap.servers": self._servers,
            "listeners": f"http://127.0.0.1:{self._port}",
            "offset.storage.file.filename": str(self._folder / "offsets"),
            **_WORKER,
            **self._worker,
        }
        files = [self._written("worker", worker)]
        for name, settings in self._connectors.items():
            files.append(self._written(name, {"name": name, **settings}))
        java = find_java(cache_dir() / "java").java
        class_path = os.pathsep.join(map(str, connect_jars(self._jars)))
        command = [str(java), f"-Xmx{self._memory}", *_JAVA_OPTIONS, "-cp", class_path]
        command += ["org.apache.kafka.connect.cli.ConnectStandalone", *map(str, files)]
        self._process = ServerProcess(command, log=self.log)
        self._process.wait_until(self._runs, within_s=_STARTS_WITHIN_S, what="Kafka Connect")

    @property
    def log(self) -> Path:
        """Return the file of its output."""
        return self._folder / "connect.log"

    def states(self) -> list[str]:
        """Return the state of each task of each connector, such as `RUNNING` or `FAILED` with its reason."""
        states = []
        for name in self._connectors:
            tasks = json.loads(self._get(f"/connectors/{name}/status"))["tasks"]
            states += [task["state"] if "trace" not in task else f"{task['state']}: {task['trace']}" for task in tasks]
        return states

    def _written(self, name: str, settings: Mapping[str, str]) -> Path:
        file = self._folder / f"{name}.properties"
        lines = [f"{key}={value}\n".replace("\\", "\\\\") for key, value in settings.items()]
        file.write_text("".join(lines), encoding="utf-8")
        return file

    def _runs(self) -> bool:
        try:
            states = self.states()
        except (OSError, KeyError, ValueError, http.client.HTTPException):
            return False
        return len(states) >= len(self._connectors) and all(state == "RUNNING" for state in states)

    def _get(self, path: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        try:
            connection.request("GET", path)
            return connection.getresponse().read()
        finally:
            connection.close()


def connect_jars(lines: Sequence[str]) -> list[Path]:
    """Return jars and a logger for them, fetched if they aren't cached. `ArtifactUnavailable` if one can't be."""
    pinned = [line.split() for line in lines if line and not line.startswith("#")]
    pinned += [list(jar) for jar in JARS if jar[0] == "org.apache.logging.log4j"]
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda jar: fetch(*jar[:3], sha256=jar[3]), pinned))

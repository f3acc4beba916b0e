"""A real Iceberg REST catalog for tests: the Iceberg project's own server, its jars from Maven, on SQLite.

Its state is in a folder of the test. It can be killed, and restarted on its state at the same address.
"""

from __future__ import annotations

import contextlib
import json
import os
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from millstream.spark.java import find_java
from millstream.testing._servers.iceberg_jars import JARS
from millstream.testing._servers.maven import cache_dir, fetch
from millstream.testing._servers.ports import free_port
from millstream.testing._servers.processes import EmbeddedServer, ServerProcess

_STARTS_WITHIN_S: Final = 90.0
_JAVA_OPTIONS: Final = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
_SERVER: Final = "org.apache.iceberg.rest.RESTCatalogServer"


class EmbeddedIcebergCatalog(EmbeddedServer):
    """A catalog whose tables lie in a folder, or in an object store.

    Args:
        folder: for its state and its log; empty, or with its earlier state.
        store: the options of an S3 server, as of `EmbeddedS3.options`; None: tables lie in the folder.
        warehouse: the address below which tables lie by default; None: `warehouse` in the folder.
    """

    def __init__(self, folder: Path, store: Mapping[str, str] | None = None, warehouse: str | None = None) -> None:
        super().__init__(folder)
        self._store = store
        self.warehouse: Final = warehouse or f"file://{folder}/warehouse"
        self._port = free_port()

    @property
    def uri(self) -> str:
        """Return its address."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it and return once it answers. `ArtifactUnavailable` without its jars, `java_missing` without Java."""
        self._folder.mkdir(parents=True, exist_ok=True)
        java = find_java(cache_dir() / "java").java
        # It takes its settings from variables: `__` is `-`, and `_` is a dot.
        settings = {
            "CATALOG_CATALOG__IMPL": "org.apache.iceberg.jdbc.JdbcCatalog",
            "CATALOG_URI": f"jdbc:sqlite:file:{self._folder}/catalog.db",
            # With two connections (its default) one may keep a lock for ever once the other found the file locked.
            "CATALOG_CLIENTS": "1",
            "CATALOG_JDBC_USER": "test",
            "CATALOG_JDBC_PASSWORD": "test",
            "CATALOG_WAREHOUSE": self.warehouse,
            "CATALOG_REST_PORT": str(self._port),
        }
        if self._store is not None:
            settings |= {
                "CATALOG_IO__IMPL": "org.apache.iceberg.aws.s3.S3FileIO",
                "CATALOG_S3_ENDPOINT": self._store["endpoint"],
                "CATALOG_S3_PATH__STYLE__ACCESS": "true",
                "CATALOG_S3_ACCESS__KEY__ID": self._store["access_key_id"],
                "CATALOG_S3_SECRET__ACCESS__KEY": self._store["secret_access_key"],
                "CATALOG_CLIENT_REGION": self._store["region"],
            }
        command = [str(java), *_JAVA_OPTIONS, "-cp", ":".join(map(str, iceberg_jars())), _SERVER]
        self._process = ServerProcess(command, log=self._folder / "catalog.log", environ={**os.environ, **settings})
        self._process.wait_until(self._answers, within_s=_STARTS_WITHIN_S, what="the Iceberg catalog")

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.uri}/v1/config", timeout=5) as answer:
            return "defaults" in json.load(answer)
        return False


def iceberg_jars() -> list[Path]:
    """Return the server's jars, fetched if they aren't cached. `ArtifactUnavailable` if one can't be."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda jar: fetch(*jar[:3], sha256=jar[3]), JARS))


__all__ = ["EmbeddedIcebergCatalog", "iceberg_jars"]

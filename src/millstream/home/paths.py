"""The paths in a home, and the logs in it. Reading the log needs no configuration: it works on a copied folder too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from millstream.model.ids import RegionId, can_name_stream, parse_region_log_name
from millstream.wal.files import error_of_os

FILE_NAME: Final = "millstream.toml"
PIPELINE: Final = "lake"
"""The pipeline's name: part of the identity of Delta transactions, so it never changes."""


@dataclass(frozen=True)
class HomePaths:
    """The paths of a home. Making one touches nothing."""

    path: Path

    @property
    def config_file(self) -> Path:
        """Return the path of `millstream.toml`."""
        return self.path / FILE_NAME

    @property
    def data(self) -> Path:
        """Return the folder of everything that Millstream keeps, except the lake."""
        return self.path / "data"

    @property
    def catalog_file(self) -> Path:
        """Return the embedded catalog's file; use `has_catalog` to check for a catalog."""
        return self.data / "catalog.db"

    def wal_folder(self, stream: str) -> Path:
        """Return the folder of one stream's log: a folder per shard and the durable mark."""
        return self.data / "wal" / stream

    def acks_file(self, stream: str) -> Path:
        """Return the file of followers' and the object store's positions, which the shipping process writes."""
        return self.data / "replication" / f"{stream}.acks"

    def role_file(self, stream: str) -> Path:
        """Return the file of this node's role in a stream: see `leadership.node_roles`.

        A home without the file is alone.
        """
        return self.data / "replication" / stream / "role.json"

    @property
    def alerts_file(self) -> Path:
        """Return the file of the open alerts, and of what the process that sends them has observed."""
        return self.data / "alerts.json"

    @property
    def audit_file(self) -> Path:
        """Return the file of the actions that were asked for in the console."""
        return self.data / "audit.jsonl"

    @property
    def figures_folder(self) -> Path:
        """Return the folder of the figures over time that the console's charts show."""
        return self.data / "figures"

    def delivery_folder(self, stream: str) -> Path:
        """Return the folder of the state of a stream's consumers."""
        return self.data / "delivery" / stream

    def consumers_document(self, stream: str) -> Path:
        """Return the file of the leader's consumers as a node that follows has them."""
        return self.data / "replication" / stream / "consumers.document"

    def spill_folder(self, stream: str) -> Path:
        """Return the folder for capture's transactions that are too large for memory."""
        return self.data / "spill" / stream

    @property
    def pipeline_folder(self) -> Path:
        """Return the folder of Spark checkpoints and Spark's own log."""
        return self.data / "spark" / PIPELINE

    @property
    def queries_folder(self) -> Path:
        """Return the folder for spill files of `serve`'s callers' queries; nothing stays in it."""
        return self.data / "queries"

    @property
    def prompt_history(self) -> Path:
        """Return the history file of `query`'s prompt."""
        return self.data / "query_history"

    @property
    def run_folder(self) -> Path:
        """Return the folder of locks, pid files, and the link to the sockets."""
        return self.data / "run"

    def streams_on_disk(self) -> list[str]:
        """Return the names of the streams that have a log here, sorted; `regions_on_disk` has other regions' logs."""
        return [name for name in self._logs_on_disk() if "@" not in name]

    def regions_on_disk(self, stream: str) -> dict[RegionId, str]:
        """Return by region the names of a stream's logs of other regions.

        `UsageError` if a folder's name is invalid.
        """
        found = {}
        for name in self._logs_on_disk():
            parsed = parse_region_log_name(name)
            if parsed is not None and parsed[0] == stream:
                found[parsed[1]] = name
        return dict(sorted(found.items()))

    def _logs_on_disk(self) -> list[str]:
        try:
            return sorted(
                entry.name
                for entry in (self.data / "wal").iterdir()
                # Other folders are no logs: a folder moved aside (`STREAM.…`), or `lost+found` of a
                # separate disk.
                if entry.is_dir() and (can_name_stream(entry.name) or ("@" in entry.name and "." not in entry.name))
            )
        except FileNotFoundError:
            return []
        except PermissionError as error:
            raise error_of_os(error) from error

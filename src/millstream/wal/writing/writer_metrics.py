"""Counts of a log's writer: its own since the open, and the process's metrics."""

from __future__ import annotations

from dataclasses import InitVar, dataclass

from millstream import process_metrics
from millstream.model.ids import StreamId


@dataclass
class CommitCounts:
    """Counts since the open."""

    stream: InitVar[StreamId]
    groups: int = 0
    operations: int = 0
    records: int = 0
    bytes_written: int = 0
    segments_sealed: int = 0
    recovered_cut_bytes: int = 0

    def __post_init__(self, stream: StreamId) -> None:
        label = str(stream)
        self._commits = process_metrics.COMMIT_SECONDS.of(label)
        self._all_operations = process_metrics.LOG_OPERATIONS.of(label)
        self._all_records = process_metrics.LOG_RECORDS.of(label)
        self._all_bytes = process_metrics.LOG_WRITTEN_BYTES.of(label)

    def add_group(self, *, operations: int, records: int, bytes_written: int, seconds: float) -> None:
        """Count a durable commit group, which took that long to write and show."""
        self.groups += 1
        self.operations += operations
        self.records += records
        self.bytes_written += bytes_written
        self._commits.observe(seconds)
        self._all_operations.add(operations)
        self._all_records.add(records)
        self._all_bytes.add(bytes_written)

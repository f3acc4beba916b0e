"""Counts of a log's writer: its own since the open, and the process's metrics."""

from __future__ import annotations

from dataclasses import dataclass

from millstream import measures
from millstream.model.ids import StreamId


@dataclass(slots=True)
class CommitCounts:
    """Counts since the open."""

    stream: StreamId
    groups: int = 0
    operations: int = 0
    records: int = 0
    bytes_written: int = 0
    segments_sealed: int = 0
    recovered_cut_bytes: int = 0

    def __post_init__(self) -> None:
        for counter in (measures.LOG_OPERATIONS, measures.LOG_RECORDS, measures.LOG_WRITTEN_BYTES):
            counter.add(0, str(self.stream))  # `increase()` sees the first group

    def add_group(self, *, operations: int, records: int, bytes_written: int, seconds: float) -> None:
        """Count a durable commit group, which took that long to write and show."""
        self.groups += 1
        self.operations += operations
        self.records += records
        self.bytes_written += bytes_written
        label = str(self.stream)
        measures.COMMIT_SECONDS.observe(seconds, label)
        measures.LOG_OPERATIONS.add(operations, label)
        measures.LOG_RECORDS.add(records, label)
        measures.LOG_WRITTEN_BYTES.add(bytes_written, label)

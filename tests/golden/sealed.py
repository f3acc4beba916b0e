"""A golden segment's two files: the sealed segment, and its contents as read."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from millstream.codec.checksums import Bytes
from millstream.codec.log_frame import RecordsFrame, decode_frame
from millstream.codec.log_schemas import SchemaSet
from millstream.codec.log_segment import FrameEntry, FrameTable, SegmentFooter, SegmentHeader
from millstream.model.positions import Offset

HERE = Path(__file__).parent
MOMENT = dt.datetime(2026, 11, 20, 12, 34, 56, 789000, tzinfo=dt.UTC)
"""Time of every record in the files."""


def write_golden(name: str, segment: SegmentHeader, frames: Iterable[list[Bytes]]) -> None:
    """Write `name.wal` and `name.json` from a segment's header and its encoded frames."""
    file, heads, known = bytearray(segment.encode()), hashlib.sha256(), SchemaSet(segment.directory)
    entries, rows, count = [], [], 0
    for buffers in frames:
        data = b"".join(map(bytes, buffers))
        heads.update(bytes(buffers[0]))
        frame = decode_frame(data, known)
        header = frame.header
        count += header.count
        stamp = int(MOMENT.timestamp() * 1_000_000) if isinstance(frame, RecordsFrame) else None
        if isinstance(frame, RecordsFrame):
            for table in frame.table_ids():
                for schema, records in frame.records(table, offsets=True):
                    rows += [{"table": schema.name} | row for row in records.to_pylist()]
        entries.append(
            FrameEntry(
                header.kind, header.first_offset, header.count, len(file), len(data), header.more, header.first_seq,
                header.last_seq, header.group_last_seq, header.group, stamp, stamp,
                tuple(FrameTable(p.table_id, p.schema_version, p.rows, p.length) for p in header.parts),
            )
        )  # fmt: skip
        file += data
    end = Offset(segment.base_offset + count)
    file += SegmentFooter(tuple(entries), end, count, heads.digest()).encode()
    (HERE / f"{name}.wal").write_bytes(bytes(file))
    expected = {"stream": str(segment.stream), "end_offset": end, "rows": json.loads(json.dumps(rows, default=str))}
    (HERE / f"{name}.json").write_text(json.dumps(expected, indent=1) + "\n")

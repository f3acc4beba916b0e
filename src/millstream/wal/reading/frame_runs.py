"""Runs of frames, decoded together, also across segments.

A run costs as much as ten thousand rows, so short runs are slow: of one table among many, a segment
holds few rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import pyarrow as pa

from millstream.codec.log_directory import Ints
from millstream.codec.log_run import FrameHead, FramePart, FrameRun, RunRecords
from millstream.codec.log_schemas import SchemaSet
from millstream.errors import CorruptFrame
from millstream.model.ids import SchemaVersion, TableId
from millstream.model.positions import Seq
from millstream.wal.reading.table_records import TableRecords, piece_of, straddles, within_seqs
from millstream.wal.segment_scan import ScannedFrame

if TYPE_CHECKING:
    from millstream.wal.reading.segment_reader import SegmentSource

_RUN_FRAMES_MAX: Final = 1024
_RUN_ROWS_MAX: Final = 1 << 15
"""Rows in a run: from here on a run's own cost hardly counts, and rows may be large once they are decompressed."""
_RUN_BYTES_MAX: Final = 8 << 20
"""Bytes of payload in a run."""
_Key = tuple[TableId, SchemaVersion]
Run: TypeAlias = "Sequence[tuple[SegmentSource, ScannedFrame]]"
"""Consecutive frames of one shard and epoch, each with its segment."""


def run_records(
    run: Run,
    after: Seq | None,
    upto: Seq | None,
    wanted: frozenset[TableId] | None,
    *,
    columns: frozenset[str] | None = None,
    offsets: bool = False,
    moments: bool = False,
    by_table: bool = False,
) -> Iterator[TableRecords]:
    """As `SegmentSource.records` for each frame of a run; records that no other table's rows separate are one piece.

    With `by_table`, tables come one after the other, whatever the order of their frames.
    """
    found: list[TableRecords] | None = None
    if len(run) > 1:
        # If it fails, the frames are read one by one, which shows the damaged one.
        with suppress(CorruptFrame):
            found = _decode_run(run, wanted, columns=columns, offsets=offsets, moments=moments, by_table=by_table)
    if found is not None:
        headers = [scanned.header for _, scanned in run]
        is_cut = straddles(min(h.first_seq for h in headers), max(h.last_seq for h in headers), after, upto)
        for piece in found:
            yield from within_seqs(piece, after, upto) if is_cut else (piece,)
        return
    for source, scanned in run:
        yield from source.records(scanned, after, upto, wanted, columns=columns, offsets=offsets, moments=moments)


def _decode_run(
    run: Run,
    wanted: frozenset[TableId] | None,
    *,
    columns: frozenset[str] | None,
    offsets: bool,
    moments: bool,
    by_table: bool,
) -> list[TableRecords] | None:
    """Return the pieces of a run; None if a table's numbers don't ascend from frame to frame.

    Raises `CorruptFrame`.
    """
    parts, decoded = _decode_parts(run, wanted, columns=columns, offsets=offsets, moments=moments)
    if not all(records.ascends for records, _ in decoded.values()):
        return None  # an operation on several partitions of a table continues over frames
    done = dict.fromkeys(decoded, 0)
    pieces = []
    for key, some in groupby(sorted(parts, key=_table) if by_table else parts, key=_key):
        of_piece = list(some)
        start, (records, times_ns) = done[key], decoded[key]
        done[key] = end = start + sum(part.part.rows for part in of_piece)
        batch = records.batch.slice(start, end - start)
        operation_seq, hybrid_ns = pa.array(records.operation_seq[start:end]), pa.array(times_ns[start:end])
        header = run[of_piece[0].frame][1].header
        pieces.append(piece_of(header, records.schema, batch, operation_seq, hybrid_ns))
    return pieces


def _decode_parts(
    run: Run,
    wanted: frozenset[TableId] | None,
    *,
    columns: frozenset[str] | None,
    offsets: bool,
    moments: bool,
) -> tuple[list[FramePart], dict[_Key, tuple[RunRecords, Ints]]]:
    """Return a run's parts in their order; and by table and version the records, with the hybrid time of each.

    Raises `CorruptFrame`.
    """
    of_sources = [(source, list(of_source)) for source, of_source in groupby(enumerate(run), _source)]
    schemas = _schemas_of([source for source, _ in of_sources])
    frames = FrameRun([FrameHead(s.header, s.operations, s.batches) for _, s in run], schemas)
    parts = [
        part
        for source, of_source in of_sources
        for part in source.read_parts([(number, scanned) for number, (_, scanned) in of_source], wanted)
    ]
    tables: dict[_Key, list[FramePart]] = {}
    for part in parts:
        tables.setdefault(_key(part), []).append(part)
    decoded = {}
    for key, of_table in tables.items():
        records = frames.records(of_table, columns=columns, offsets=offsets, moments=moments)
        times = [run[part.frame][1].header.hybrid_time for part in of_table]
        decoded[key] = records, np.repeat(np.array(times, np.int64), [part.part.rows for part in of_table])
    return parts, decoded


def _source(numbered: tuple[int, tuple[SegmentSource, ScannedFrame]]) -> SegmentSource:
    return numbered[1][0]


def _schemas_of(sources: Sequence[SegmentSource]) -> SchemaSet:
    """Return the schemas of a run's segments. Raises `CorruptFrame` if one schema differs between two of them."""
    if len(sources) == 1:
        return sources[0].schemas
    found = SchemaSet(sources[0].schemas.directory)
    for source in sources:
        for key, schema in source.schemas.tables.items():
            if key not in found:
                found.add(schema)
            elif found.find(*key) != schema:
                raise CorruptFrame(f"schema {key[1]} of table {key[0]} differs between two segments")
    return found


def decode_by_frame(run: Run, wanted: frozenset[TableId] | None) -> list[list[TableRecords]]:
    """Return the records of each frame of a run. Raises `CorruptFrame`."""
    parts, decoded = _decode_parts(run, wanted, columns=None, offsets=True, moments=False)
    done = dict.fromkeys(decoded, 0)
    found: list[list[TableRecords]] = [[] for _ in run]
    for part in parts:
        key = _key(part)
        records, times_ns = decoded[key]
        start = done[key]
        done[key] = end = start + part.part.rows
        found[part.frame].append(
            piece_of(
                run[part.frame][1].header,
                records.schema,
                records.batch.slice(start, end - start),
                pa.array(records.operation_seq[start:end]),
                pa.array(times_ns[start:end]),
            )
        )
    return found


def _key(part: FramePart) -> _Key:
    return part.part.table_id, part.part.schema_version


def _table(part: FramePart) -> TableId:
    return part.part.table_id


def runs_of(frames: Iterable[tuple[SegmentSource, ScannedFrame]], wanted: frozenset[TableId] | None) -> Iterator[Run]:
    """Group one shard's frames into runs that are decoded together.

    Frames without rows of the wanted tables are left out.

    Raises:
        CorruptWal: as `frames`, after the frames before the damage; likewise any other error.
    """
    run: list[tuple[SegmentSource, ScannedFrame]] = []
    size = rows = 0
    failed: Exception | None = None
    try:
        for source, scanned in frames:
            parts = [part for part in scanned.header.parts if wanted is None or part.table_id in wanted]
            if not parts:
                continue
            more, more_rows = sum([part.length for part in parts]), sum([part.rows for part in parts])
            is_full = size + more > _RUN_BYTES_MAX or rows + more_rows > _RUN_ROWS_MAX or len(run) >= _RUN_FRAMES_MAX
            if run and (is_full or not source.continues(run[-1][0])):
                yield run
                run, size, rows = [], 0, 0
            size, rows = size + more, rows + more_rows
            run.append((source, scanned))
    except Exception as error:  # noqa: BLE001 - it is raised again
        failed = error
    if run:
        yield run
    if failed is not None:
        raise failed

"""Opening a log whose writer was killed: one gigabyte, and a hundred.

The large log's sealed segments are sparse. Header and footer are real, with an entry for every frame, and the
frames between them are holes, except the last one. Opening reads no other.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from bench.figures import Figure, asked, compared, measures, say
from bench.places import folder
from bench.wal import BATCH_ROWS, EVENTS, ROW_BYTES, ReservationsInMemory, log_in, operation
from millstream.codec.log_frame import RecordsFrame, decode_frame, encode_records_frame
from millstream.codec.log_parts import NUMBERS, part_schema
from millstream.codec.log_schemas import SchemaSet
from millstream.codec.log_segment import NO_HASH, SEGMENT_HEADER_SIZE, FrameEntry, SegmentFooter, SegmentHeader
from millstream.model.ids import Epoch, GroupNumber, StreamId
from millstream.model.operations import FIRST_SHARD
from millstream.model.positions import Offset, Seq
from millstream.wal.writing.options import LogOptions
from millstream.wal.writing.writer import LogWriter

GIB = 1 << 30
SEGMENT_BYTES = 64 << 20
SMALL, LARGE = GIB // SEGMENT_BYTES, 100 * GIB // SEGMENT_BYTES
"""Sealed segments: one gigabyte, and a hundred."""
TAIL_BATCHES = 300
"""Batches of 100 KB: half a segment."""
_STREAM = StreamId(UUID(int=7))


@measures("wal_open_1g_vs_100g")
def open_small_and_large() -> Iterator[Figure]:
    """Measure opening a log as its killed writer left it, in a process of its own for each run."""
    with folder("log-open") as path:
        segment = _sealed_segment(path / "made")
        large = LARGE if asked.rows is None else max(1, asked.rows * ROW_BYTES // SEGMENT_BYTES) + SMALL
        sizes = {SMALL: path / "small", large: path / "large"}
        for segments, log in sizes.items():
            say(f"wal_open_1g_vs_100g: a log of {segments} segments")
            _write_log(log, segment, segments)
        peaks: dict[int, float] = dict.fromkeys(sizes, 0.0)

        def opened_ms(segments: int) -> float:
            took_ms, peak_mib = _open_in_a_process(sizes[segments], path / "copy")
            peaks[segments] = max(peaks[segments], peak_mib)
            return took_ms

        figure = compared(
            "wal_open_1g_vs_100g",
            lambda: opened_ms(large),
            lambda: opened_ms(SMALL),
            unit="ms",
            goal="<= 2",
            rows=0,
            size_bytes=large * SEGMENT_BYTES,
            note="",
        )
        yield replace(
            figure,
            note=f"ours is the log of {large} segments, the peer that of {SMALL}; 64 MiB each in frames of 100 kB, sparse but for headers and footers; an"
            " open segment of 30 MB behind them, as a killed writer leaves it; from LogWriter.open to its return, in a new process;"
            f" at most {peaks[large]:.0f} MiB resident for the large, {peaks[SMALL]:.0f} for the small (goal: < 256)",
        )


def _sealed_segment(path: Path) -> Path:
    """Make a sealed segment of the full size, as the log writes it."""
    path.mkdir()
    with log_in(path, options=LogOptions(segment_bytes=SEGMENT_BYTES)) as writer:
        while len(list((path / "wal" / "00000").glob("*.wal"))) < 2:
            writer.append(operation([os.urandom(ROW_BYTES) for _ in range(BATCH_ROWS)]))
    return min((path / "wal" / "00000").glob("*.wal"))


def _write_log(log: Path, made: Path, count: int) -> None:
    """Make so many segments after the pattern of one, and an open one of a killed writer."""
    shard = log / f"{FIRST_SHARD:05d}"
    shard.mkdir(parents=True)
    with made.open("rb") as file:
        header = SegmentHeader.decode(file.read(SEGMENT_HEADER_SIZE))

        def read(position: int, length: int) -> bytes:
            return os.pread(file.fileno(), length, position)

        footer = SegmentFooter.decode_tail(read, made.stat().st_size)
        assert footer is not None
        last = _last_frame(read, header, footer)
    previous = NO_HASH
    for number in range(count):
        rows, groups = number * footer.record_count, number * footer.frames[-1].group
        entries = tuple(_moved(entry, rows, groups) for entry in footer.frames)
        encoded = replace(footer, frames=entries, end_offset=Offset(footer.end_offset + rows)).encode()
        with (shard / f"{rows:020d}.wal").open("wb") as out:
            begun = replace(header, stream=_STREAM, base_offset=Offset(rows), previous_hash=previous)
            out.write(begun.encode())
            end = entries[-1].position + entries[-1].length
            if number + 1 == count:
                out.seek(entries[-1].position)
                out.write(_frame_at(last, entries[-1], rows))
            out.seek(end)
            out.write(encoded)
        previous = SegmentFooter.encoded_hash(encoded)
    subprocess.run([sys.executable, "-m", "bench.log_open", "write", str(log)], check=True)


def _moved(entry: FrameEntry, rows: int, groups: int) -> FrameEntry:
    return replace(
        entry,
        offset=Offset(entry.offset + rows),
        first_seq=Seq(entry.first_seq + rows if entry.first_seq else 0),
        last_seq=Seq(entry.last_seq + rows if entry.last_seq else 0),
        group_last_seq=Seq(entry.group_last_seq + rows),
        group=GroupNumber(entry.group + groups),
    )


def _last_frame(read: Callable[[int, int], bytes], header: SegmentHeader, footer: SegmentFooter) -> RecordsFrame:
    schemas = SchemaSet(header.directory)
    schemas.add(EVENTS)
    entry = footer.frames[-1]
    frame = decode_frame(read(entry.position, entry.length), schemas)
    assert isinstance(frame, RecordsFrame)
    return frame


def _frame_at(frame: RecordsFrame, entry: FrameEntry, rows: int) -> bytes:
    """Return the same rows under the numbers that the entry names."""
    column = frame.batches.schema.get_field_index("first_seq")
    numbers = frame.batches.column(column)
    batches = frame.batches.set_column(
        column, frame.batches.schema.field(column), pc.add(numbers, pa.scalar(rows, numbers.type))
    )
    told = replace(
        frame.header,
        first_offset=entry.offset,
        first_seq=entry.first_seq,
        last_seq=entry.last_seq,
        group_last_seq=entry.group_last_seq,
        group=entry.group,
        reserved_to=Seq(frame.header.reserved_to + rows),
    )
    (part,) = frame.header.parts
    assert part.flags & NUMBERS, "the rows of one append don't depend on their numbers"
    payload = frame.log_rows(EVENTS.table_id, EVENTS.version).select(part_schema(EVENTS, part.flags).names)
    return b"".join(map(bytes, encode_records_frame(told, frame.operations, batches, [(EVENTS, payload)])))


def _open(log: Path, epoch: int) -> LogWriter:
    return LogWriter.open(
        str(log),
        stream=_STREAM,
        shards=[FIRST_SHARD],
        epoch=Epoch(epoch),
        reservations=ReservationsInMemory(),
        options=LogOptions(segment_bytes=SEGMENT_BYTES),
    )


def _open_in_a_process(log: Path, copy: Path) -> tuple[float, float]:
    """Return (ms, MiB) of opening a copy; sealed segments, which no process changes, are linked."""
    shard = copy / f"{FIRST_SHARD:05d}"
    shard.mkdir(parents=True)
    files = sorted((log / shard.name).iterdir())
    tail = max(file for file in files if file.suffix == ".wal")
    for file in files:
        if file.suffix == ".wal" and file != tail:
            os.link(file, shard / file.name)
        else:
            shutil.copyfile(file, shard / file.name)
    done = subprocess.run(
        [sys.executable, "-m", "bench.log_open", "open", str(copy)], check=True, capture_output=True, text=True
    )
    shutil.rmtree(copy)
    took_ms, peak_mib = map(float, done.stdout.split())
    return took_ms, peak_mib


def main(job: str, log: Path) -> None:
    """Do the job: `write` appends to the log and dies; `open` opens it, and prints its duration."""
    began = time.perf_counter()
    writer = _open(log, 2 if job == "write" else 3)
    took_ms = (time.perf_counter() - began) * 1000
    if job == "write":
        for _ in range(TAIL_BATCHES):
            writer.append(operation([os.urandom(ROW_BYTES) for _ in range(BATCH_ROWS)]))
        os._exit(0)
    # Not by getrusage: that counts the process's memory before it became this program, too.
    peak_kib = next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    print(took_ms, int(peak_kib) / 1024, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

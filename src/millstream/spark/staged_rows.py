"""Rows on their way from Spark's tasks to the driver, which appends them: in shared files, or in the message itself.

Sizes and cuts depend on the rows alone, never on their order or their division into tasks or
batches. A batch that Spark repeats, divided differently, gives the same parts. So a part that was
appended before is recognised.
"""

from __future__ import annotations

import re
import time
import uuid
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import WriterCommitMessage

from millstream.errors import EngineError, IngestError
from millstream.private_files import make_folder

PART_BYTES: Final = 24 << 20
"""Size of the rows of one operation; a server takes 32 MiB in a request by default."""
MESSAGE_BYTES_MAX: Final = 64 << 20
"""Maximum size of a task's rows that travel through the driver, which holds those of all tasks."""
_BUCKETS_MAX: Final = 256
"""Maximum number of files open at a time."""
_ABANDONED_S: Final = 86_400.0
"""Age at which a job's leftover folder counts as abandoned: no batch takes so long."""
_OF_A_JOB: Final = re.compile(r"[0-9a-f]{32}\Z")
"""The name of a folder that a job makes; other entries in the same folder may belong to others."""
_NOT_OF_ROWS: Final = 5
"""Bytes of a value in addition to its own: whether it is null, and where it begins."""


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """A task's rows."""

    rows: int
    size: int
    """Size as `measure` returns it."""
    data: bytes = b""
    """An Arrow stream; empty if the rows are in a file."""
    file: str = ""
    query: str = ""
    """The id of the streaming query; empty for a batch."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows.

        Raises:
            EngineError: the file can't be read from here.
        """
        try:
            with ExitStack() as opened:
                source = opened.enter_context(pa.memory_map(self.file)) if self.file else pa.py_buffer(self.data)
                yield from opened.enter_context(pa.ipc.open_stream(source))
        except (OSError, pa.ArrowException) as error:
            raise EngineError(
                f"rows that a task has left in {self.file} can't be read: {error}",
                hint='Name a folder that the driver and all executors share: .option("staging", …).',
                file=self.file,
            ) from error

    def drop(self) -> None:
        """Remove the file."""
        if self.file:
            with suppress(OSError):
                Path(self.file).unlink()


def stage(batches: Iterator[pa.RecordBatch], schema: pa.Schema, folder: Path | None, query: str) -> Staged:
    """Take a task's rows.

    Args:
        folder: the folder for files; None: the rows go into the message.
        query: see `Staged`.

    Raises:
        IngestError (`rows_too_large`): there are more than a message may hold.
        EngineError: the folder can't be written.
    """
    rows = size = 0
    file = None if folder is None else folder / f"{uuid.uuid4().hex}.arrow"
    held = pa.BufferOutputStream()
    try:
        if file is not None:
            make_folder(file.parent)
        with ExitStack() as opened:
            sink = held if file is None else opened.enter_context(pa.OSFile(str(file), "wb"))
            out = opened.enter_context(pa.ipc.new_stream(sink, schema))
            for batch in batches:
                out.write_batch(batch)
                rows, size = rows + batch.num_rows, size + measure(batch)
                if file is None and size > MESSAGE_BYTES_MAX:
                    raise IngestError(
                        f"a task has more than {MESSAGE_BYTES_MAX} bytes of rows, and hands them over through the driver",
                        code="rows_too_large",
                        hint='Name a folder that the driver and all executors share, .option("staging", …), or more partitions.',
                        what="rows of a task",
                        size=size,
                        size_max=MESSAGE_BYTES_MAX,
                    )
    except BaseException as error:
        if file is not None:
            with suppress(OSError):
                file.unlink()
        if isinstance(error, OSError):
            raise EngineError(f"rows can't be put into {folder}: {error}", folder=str(folder)) from error
        raise
    if file is not None:
        return Staged(rows, size, file=str(file), query=query)
    return Staged(rows, size, data=held.getvalue().to_pybytes(), query=query)


def forget_abandoned(folder: Path) -> None:
    """Remove what jobs left behind that ended abruptly; others may also use the folder."""
    before = time.time() - _ABANDONED_S
    with suppress(OSError):
        for entry in folder.iterdir():
            if _OF_A_JOB.match(entry.name) and not entry.is_symlink() and entry.is_dir():
                with suppress(OSError):
                    _forget(entry, before)


def _forget(job: Path, before: float) -> None:
    if job.stat().st_mtime < before:
        for file in job.glob("*.arrow"):
            file.unlink()
        job.rmdir()


def measure(batch: pa.RecordBatch) -> int:
    """Return the size of rows in bytes; it is additive, however the rows are divided into batches."""
    return sum(_size_of(column) for column in batch.columns)


def _size_of(column: pa.Array) -> int:
    kind, count = column.type, len(column)
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return int(pc.sum(pc.binary_length(column)).as_py() or 0) + _NOT_OF_ROWS * count
    if pa.types.is_list(kind):
        return _size_of(column.flatten()) + _NOT_OF_ROWS * count
    if pa.types.is_struct(kind):
        # As JSON each value comes with its name.
        names = sum(len(field.name) + _NOT_OF_ROWS for field in kind)
        return sum(_size_of(field) for field in column.flatten()) + names * count
    width = 1 if pa.types.is_null(kind) or pa.types.is_boolean(kind) else kind.bit_width // 8
    return (width + 1) * count


def parts_of(
    staged: Sequence[Staged], schema: pa.Schema, *, ordered: bool, part_bytes: int = PART_BYTES
) -> Iterator[pa.Table]:
    """Yield the rows of all tasks, in parts that are an operation each: one part, if the rows are few.

    Args:
        ordered: whether equal rows must come in the same order even in a single part; otherwise the tasks' order stays.

    Returns:
        The same parts for the same rows, whatever tasks they come from. One part at a time is in memory.
    """
    total = sum(one.size for one in staged)
    if total <= part_bytes:
        batches = [batch for one in staged for batch in one.batches()]
        rows = pa.Table.from_batches(batches, schema)
        if ordered:
            yield from _cut(rows, part_bytes)
        elif rows.num_rows:
            yield rows
        return
    count = min(_BUCKETS_MAX, 2 * total // part_bytes + 1)
    with TemporaryDirectory(prefix="millstream-sink-") as folder, ExitStack() as opened:
        files = [Path(folder) / f"{number}.arrow" for number in range(count)]
        with ExitStack() as writing:
            outs = [writing.enter_context(pa.ipc.new_stream(str(file), schema)) for file in files]
            for one in staged:
                for batch in one.batches():
                    for number, places in _by_bucket(batch, count).items():
                        outs[number].write_batch(batch.take(pa.array(places)))
        for file in files:
            source = opened.enter_context(pa.memory_map(str(file)))
            yield from _cut(pa.ipc.open_stream(source).read_all(), part_bytes)
            file.unlink()


def _by_bucket(batch: pa.RecordBatch, count: int) -> dict[int, list[int]]:
    places: dict[int, list[int]] = {}
    for place, key in enumerate(_keys(batch)):
        places.setdefault(zlib.crc32(key) % count, []).append(place)
    return places


def _cut(rows: pa.Table, part_bytes: int) -> Iterator[pa.Table]:
    """Yield rows, sorted by their values, in pieces of bounded size."""
    keys = [key for batch in rows.to_batches() for key in _keys(batch)]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    width = 8 * rows.num_columns
    begin = size = 0
    for place, row in enumerate(order):
        of_row = len(keys[row]) + width
        if size + of_row > part_bytes and place > begin:
            yield rows.take(pa.array(order[begin:place]))
            begin, size = place, 0
        size += of_row
    if begin < len(order):
        yield rows.take(pa.array(order[begin:]))


def _keys(batch: pa.RecordBatch) -> list[bytes]:
    """Return each row's values as bytes, which are equal only for equal values."""
    columns = [column.to_pylist() for column in batch.columns]
    return [repr(row).encode(errors="surrogatepass") for row in zip(*columns, strict=True)]

"""What Spark's tasks hand over to the driver, to be appended there: rows in files that both see, or in the message itself; and how large it is.

Sizes and cuts depend on the rows alone, never on how they were divided into tasks or batches, nor on their order: a batch that Spark runs
again, divided otherwise, comes to the same parts. So a part that was appended before is known for what it is.
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

from millstream.errors import EngineError, RowsTooLarge
from millstream.private_files import make_folder

PART_BYTES: Final = 24 << 20
"""Of rows that become one operation: a server takes 32 MiB in a request, where nobody says otherwise."""
MESSAGE_BYTES_MAX: Final = 64 << 20
"""Of a task's rows that travel through the driver: it holds those of all tasks."""
_BUCKETS_MAX: Final = 256
"""Files that are open at a time."""
_ABANDONED_S: Final = 86_400.0
"""After which what a job has left is nobody's: no batch takes so long."""
_OF_A_JOB: Final = re.compile(r"[0-9a-f]{32}\Z")
"""The name of a folder that a job makes: what else lies beside it may be anybody's."""
_NOT_OF_ROWS: Final = 5
"""Bytes of a value beside its own: whether there is one, and where it begins."""


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """A task's rows."""

    rows: int
    size: int
    """As `measure` has it."""
    data: bytes = b""
    """An Arrow stream; empty where it lies in a file."""
    file: str = ""
    query: str = ""
    """The id of the streaming query; empty of a batch."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows.

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
        """Take the file away."""
        if self.file:
            with suppress(OSError):
                Path(self.file).unlink()


def stage(batches: Iterator[pa.RecordBatch], schema: pa.Schema, folder: Path | None, query: str) -> Staged:
    """Take a task's rows.

    Args:
        batches: in `schema`.
        schema: theirs.
        folder: where files go; None: into the message.
        query: see `Staged`.

    Raises:
        RowsTooLarge: there are more than a message may hold.
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
                    raise RowsTooLarge(
                        f"a task has more than {MESSAGE_BYTES_MAX} bytes of rows, and hands them over through the driver",
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
    """Take away what jobs have left that ended without a word; others may use the folder, too."""
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
    """Bytes of rows: of several batches together as much as of each, however they are divided."""
    return sum(_size_of(column) for column in batch.columns)


def _size_of(column: pa.Array) -> int:
    kind, count = column.type, len(column)
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return int(pc.sum(pc.binary_length(column)).as_py() or 0) + _NOT_OF_ROWS * count
    if pa.types.is_list(kind):
        return _size_of(column.flatten()) + _NOT_OF_ROWS * count
    if pa.types.is_struct(kind):
        # As JSON each value has its name beside it.
        names = sum(len(field.name) + _NOT_OF_ROWS for field in kind)
        return sum(_size_of(field) for field in column.flatten()) + names * count
    width = 1 if pa.types.is_null(kind) or pa.types.is_boolean(kind) else kind.bit_width // 8
    return (width + 1) * count


def parts_of(staged: Sequence[Staged], schema: pa.Schema, *, ordered: bool) -> Iterator[pa.Table]:
    """The rows of all tasks, in parts that are an operation each: one, where they are few.

    Args:
        staged: what tasks have handed over.
        schema: the rows'.
        ordered: whether the same rows have to come in the same order also where they are one part; else that is as tasks had them.

    Returns:
        Of the same rows the same parts, whatever tasks they come from. In memory is one part at a time.
    """
    total = sum(one.size for one in staged)
    if total <= PART_BYTES:
        batches = [batch for one in staged for batch in one.batches()]
        rows = pa.Table.from_batches(batches, schema)
        if ordered:
            yield from _cut(rows)
        elif rows.num_rows:
            yield rows
        return
    count = min(_BUCKETS_MAX, 2 * total // PART_BYTES + 1)
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
            yield from _cut(pa.ipc.open_stream(source).read_all())
            file.unlink()


def _by_bucket(batch: pa.RecordBatch, count: int) -> dict[int, list[int]]:
    places: dict[int, list[int]] = {}
    for place, key in enumerate(_keys(batch)):
        places.setdefault(zlib.crc32(key) % count, []).append(place)
    return places


def _cut(rows: pa.Table) -> Iterator[pa.Table]:
    """Rows in an order of their own, in pieces of so many bytes."""
    keys = [key for batch in rows.to_batches() for key in _keys(batch)]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    width = 8 * rows.num_columns
    begin = size = 0
    for place, row in enumerate(order):
        of_row = len(keys[row]) + width
        if size + of_row > PART_BYTES and place > begin:
            yield rows.take(pa.array(order[begin:place]))
            begin, size = place, 0
        size += of_row
    if begin < len(order):
        yield rows.take(pa.array(order[begin:]))


def _keys(batch: pa.RecordBatch) -> list[bytes]:
    """Each row's values, as bytes that are the same for the same values alone."""
    columns = [column.to_pylist() for column in batch.columns]
    return [repr(row).encode(errors="surrogatepass") for row in zip(*columns, strict=True)]

"""`wal export` and `wal import`: records for other programs, and a log as files that restore the same log."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from millstream.cli.context import Invocation, note, pass_invocation, stream_option
from millstream.model.human_text import counted

if TYPE_CHECKING:
    from millstream.errors import CorruptWal
    from millstream.export.records_text import LineProtocol
    from millstream.home.home import Home
    from millstream.model.ids import TableId
    from millstream.model.positions import Offset, Seq
    from millstream.wal.reader import StreamReader
    from millstream.wal.records_json import Cat


@click.command()
@click.option(
    "--format",
    "style",
    type=click.Choice(["ndjson", "arrow", "csv", "line-protocol"]),
    default="ndjson",
    show_default=True,
    help="Format of the output; `wal import` reads arrow.",
)
@click.option("--since", metavar="WHEN", help="Start: a time, a token (exclusive) or a number.")
@click.option("--until", metavar="WHEN", help="End: a time, a token or a number.")
@click.option("--table", metavar="T", help="Only this table, as schema.table.")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="A file, or a folder for arrow and csv. [default: stdout]",
)
@click.option(
    "--values",
    type=click.Choice(["json", "text"]),
    default="json",
    show_default=True,
    help="For ndjson: JSON numbers, or every value as PostgreSQL prints it.",
)
@stream_option
@pass_invocation
def export(
    invocation: Invocation,
    style: str,
    since: str | None,
    until: str | None,
    table: str | None,
    output: Path | None,
    values: str,
    stream: str | None,
) -> None:
    """Export records in order: as JSON lines, CSV, InfluxDB line protocol, or lossless Arrow files.

    A time selects whole commit groups, by their commit time at the source. CSV and Arrow of one
    table go to stdout; several tables go to a folder, one file each. The export skips damage, with
    exit code 3; Arrow files in a folder have all of it or none, and stop at damage.
    """
    from millstream.app.log_readers import open_reader
    from millstream.errors import UsageError
    from millstream.export.record_reading import table_ids
    from millstream.wal.records_json import Cat

    if output is not None and output.exists() and output.is_dir() != (style in {"arrow", "csv"}):
        what, wanted_kind = ("folder", "file") if output.is_dir() else ("file", "folder")
        raise UsageError(f"{output} is a {what}, and {style} needs a {wanted_kind}", hint="Name another with --output.")
    home = invocation.home(needs_source=False)
    name = home.pick_stream(stream)
    damage = DamagePrinter()
    reader = open_past_damage(home, name, damage)
    wanted = None if table is None else frozenset(table_ids(reader, table))
    if output is None and table is None and style in ("arrow", "csv"):
        wanted = sole_table(reader)
        if not wanted:
            raise UsageError(
                f"{style} of several tables can't go to stdout",
                hint="Name a folder with --output, or one table with --table.",
            )
    after, upto = _bounds(reader, since, until)
    if style == "arrow":
        if output is None:
            assert wanted is not None
            write_stream(reader, after, upto, wanted)
            sys.exit(3 if damage.told else 0)
        from millstream.export.log_export import export_arrow

        strict = open_reader(home, name, without_mark=reader.lacks_marks(), of_any_age=True)
        with _named(output):
            count = export_arrow(
                strict, output, stream=name, after=after, upto=upto, tables=wanted, catalog=_catalog_facts(home, name)
            )
        note(f"{counted(count, 'record')} in {output}")
        return
    as_text = style == "csv" or values == "text"
    cat = Cat(
        name,
        reader,
        "text" if as_text else "json",
        wanted,
        numbers=(after, upto),
        moments=style == "line-protocol",
    )
    with contextlib.nullcontext() if output is None else _named(output):
        if style == "csv":
            count = _write_csv(cat, reader, wanted, output)
        else:
            with _opened(output) as out:
                count = _write_lines(cat, style, out)
    sys.stdout.flush()
    if output is not None:
        note(f"{counted(count, 'record')} in {output}")
    sys.exit(3 if damage.told else 0)


@click.command("import")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@stream_option
@pass_invocation
def import_(invocation: Invocation, folder: Path, stream: str | None) -> None:
    """Import an Arrow export into a stream that has no records.

    The import is complete or absent; repeat an interrupted one. Without --stream, the stream has
    the name in the export.
    """
    from millstream.export.log_export import read_export
    from millstream.export.log_import import import_log

    home = invocation.home(needs_source=False)
    name = stream or str(read_export(folder)["stream"])
    note(f"importing into stream {name} of {home.path}")
    count = import_log(home, name, folder.absolute())
    note(counted(count, "record"))


class DamagePrinter:
    """Prints each damaged place once, on stderr."""

    def __init__(self) -> None:
        self.told: set[str] = set()

    def __call__(self, error: CorruptWal) -> None:
        """Print one."""
        if error.message not in self.told:
            self.told.add(error.message)
            note(f"damaged: {error.message}")


def open_past_damage(
    home: Home, stream: str, damage: DamagePrinter, *, without_mark: bool = False, definitions: bool = False
) -> StreamReader:
    """Return a reader that leaves out unreadable parts, and works without a mark if there is none."""
    from millstream.app.log_readers import open_reader

    if without_mark or open_reader(home, stream, of_any_age=True).lacks_marks():
        without_mark = True
        note("without the mark: every valid complete group is shown, durable or not")
    shown = {"without_mark": without_mark, "definitions": definitions}
    return open_reader(home, stream, on_damage=damage, of_any_age=True, **shown)


def tables_meant(home: Home, stream: str, reader: StreamReader, table: str) -> list[TableId]:
    """Return the ids of the tables of a name, also of a table that only the catalog knows; raises as `table_ids`."""
    from millstream.app.log_readers import tables_named
    from millstream.errors import MillstreamError
    from millstream.export.record_reading import table_ids

    def known() -> list[TableId]:
        with contextlib.suppress(ImportError, MillstreamError):
            return tables_named(home, stream, table)
        return []

    return table_ids(reader, table, known=known)


def sole_table(reader: StreamReader) -> frozenset[TableId]:
    """Return the ids of the log's only table, several if it was recreated; none if the log has several tables or none."""
    schemas = reader.schemas()
    names = {(schema.kind, schema.full_name) for schema in schemas.values()}
    return frozenset(schemas if len(names) == 1 else ())


def _bounds(reader: StreamReader, since: str | None, until: str | None) -> tuple[Seq, Seq]:
    """Return the requested `(after, upto]` within the existing range.

    A time may precede the records that retention has left; that is reported on stderr.

    Raises:
        OffsetExpired: retention has dropped the records of a token or a number.
        TokenFromFuture: a token or a number is beyond the end.
        UsageError: it ends before it begins.
        PositionError (`invalid_time`, `invalid_token`): as `parse_as_of`.
    """
    from millstream.errors import UsageError
    from millstream.model.as_of_parsing import microseconds
    from millstream.model.positions import Seq

    begin = after = Seq(reader.first_seq() - 1)
    upto = reader.persisted_upto()
    first, last = (None if text is None else _asked(reader, text, upto) for text in (since, until))
    if isinstance(first, datetime) and isinstance(last, datetime):
        is_backward = first > last
    else:
        is_backward = isinstance(first, int) and isinstance(last, int) and first > last
    if is_backward:
        raise UsageError(f"--since {since} is later than --until {until}", hint="Exchange the two.")
    if isinstance(first, datetime):
        after = Seq(max(after, reader.numbers_at(microseconds(first))[0]))
        if 0 < begin == after:
            note(
                f"retention has dropped numbers up to {begin}; the export begins after them, which may be later than "
                f"{since}"
            )
    elif first is not None:
        after = Seq(max(0, first - 1 if str(since).isdigit() else first))
        reader.cut(after)  # raises if retention has dropped what follows
    if isinstance(last, datetime):
        upto = Seq(min(upto, reader.numbers_at(microseconds(last))[1]))
        if first is None and 0 < begin == upto:
            note(f"retention has dropped numbers up to {begin}; no other records committed up to {until} remain")
    elif last is not None:
        upto = last
        if first is None:
            reader.extent.check_end(upto)
    return after, Seq(max(after, upto))


def _asked(reader: StreamReader, text: str, upto: Seq) -> datetime | Seq:
    """Return the time or the number that a text names."""
    from millstream.model.as_of_parsing import parse_as_of
    from millstream.model.positions import Seq
    from millstream.wal.readable_range import from_future

    if text.isdigit():
        found = Seq(int(text))
    else:
        asked = parse_as_of(text, reader.stream_id, now=datetime.now(UTC))
        if isinstance(asked, datetime):
            return asked
        found = asked.linear()
    if found > upto:
        raise from_future(text, upto)
    return found


@contextlib.contextmanager
def _named(output: Path) -> Iterator[None]:
    """Name the output in an error of the disk: a write to an open file doesn't."""
    from millstream.wal.files import naming

    try:
        yield
    except OSError as error:
        raise naming(error, str(output)) from error


@contextlib.contextmanager
def _opened(output: Path | None) -> Iterator[TextIO]:
    """Yield stdout, or a file that appears when it is whole."""
    if output is None:
        yield sys.stdout
        return
    from millstream.private_files import replacing

    with replacing(output, private=False) as file:
        out = io.TextIOWrapper(file, encoding="utf-8", newline="")
        yield out
        out.detach()


def _write_lines(cat: Cat, style: str, out: TextIO) -> int:
    """Write records as lines, and report those that don't fit the format; return how many were written."""
    from millstream.export.records_text import LineProtocol
    from millstream.model.record_json import to_json

    protocol, written = LineProtocol(), 0
    for line in cat.records():
        text = to_json(line.facts) if style == "ndjson" else protocol.line(line)
        if text is not None:
            out.write(text + "\n")
            written += 1
    note_left_out(protocol)
    return written


def note_left_out(protocol: LineProtocol) -> None:
    """Report the records and values that the lines lack, on stderr."""
    for what, count in protocol.left_out.items():
        if count:
            note(f"{count:,} {what}")


def _write_csv(cat: Cat, reader: StreamReader, wanted: frozenset[TableId] | None, output: Path | None) -> int:
    """Write a file per table, under its newest name, or everything requested to stdout; return how many records."""
    from millstream.export.records_text import CsvTable
    from millstream.lake.layout import folder_of

    schemas = reader.schema_versions()
    newest = {table: schema for (table, _), schema in schemas.items() if wanted is None or table in wanted}
    files = {table: None if output is None else output / f"{folder_of(schema)}.csv" for table, schema in newest.items()}
    written: dict[Path | None, CsvTable] = {}

    def begin(file: Path | None, out: TextIO) -> CsvTable:
        written[file] = CsvTable(out, schemas, {table for table, its in files.items() if its == file})
        return written[file]

    count = 0
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        for line in cat.records():
            file = files[line.schema.table_id]
            found = written.get(file) or begin(file, stack.enter_context(_opened(file)))
            found.write(line)
            count += 1
    for file in files.values():
        if file not in written:  # none of its records are in the range: a header all the same
            with _opened(file) as out:
                begin(file, out)
    return count


def write_stream(
    reader: StreamReader,
    after: Seq,
    upto: Seq,
    wanted: frozenset[TableId],
    *,
    start: Offset | None = None,
    limit: int | None = None,
) -> None:
    """Write one table's records to stdout, as an Arrow stream; without any, its newest columns."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from millstream.errors import UsageError
    from millstream.model.records import record_schema

    out: pa.ipc.RecordBatchStreamWriter | None = None
    schema: pa.Schema | None = None
    for found in reader.read_between(after, upto, offsets=True):
        if limit == 0:
            break
        if found.schema.table_id not in wanted:
            continue
        batch = (
            found.batch
            if start is None
            else found.batch.filter(pc.greater_equal(found.batch.column("__offset"), start))
        )
        if limit is not None:
            batch = batch.slice(0, limit)
            limit -= batch.num_rows
        if not batch.num_rows:
            continue
        if out is None:
            out = pa.ipc.new_stream(sys.stdout.buffer, batch.schema)
            schema = batch.schema
        if not batch.schema.equals(schema):
            raise UsageError(
                "the table's columns change in between, and an Arrow stream has one schema",
                hint="Use `wal export` with a folder (--output), or with a range (--since, --until).",
            )
        out.write_batch(batch)
    if out is None:
        newest = max(key for key in reader.schema_versions() if key[0] in wanted)
        out = pa.ipc.new_stream(sys.stdout.buffer, record_schema(reader.schema_versions()[newest], offsets=True))
    out.close()


def _catalog_facts(home: Home, name: str) -> dict[str, Any]:
    """Return the catalog's facts of the stream's sources and tables; empty if there are none."""
    from millstream.capture.facts_of_tables import facts_of_tables
    from millstream.errors import MillstreamError

    with contextlib.suppress(ImportError, MillstreamError):
        if home.has_catalog():
            with home.open_catalog() as catalog:
                stream = catalog.stream(name).id
                sources = [
                    {
                        "id": s.id,
                        "system_identifier": s.system_identifier,
                        "database": s.database,
                        "timeline": s.timeline,
                    }
                    for s in catalog.sources(stream)
                ]
                captured = facts_of_tables(catalog, stream)
                tables = [
                    {"id": t.id, "state": t.state.value, "reason": t.reason, "captured": captured.get(t.id, {})}
                    for t in catalog.tables(stream, gone=True)
                ]
                return {"sources": sources, "tables": tables}
    return {}

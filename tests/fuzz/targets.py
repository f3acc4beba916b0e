"""Every decoder of bytes and texts from outside: its valid inputs, how to run it, and which errors it may raise.

A target uses a decoder's result as its callers do, so that an impossible value shows here and not
later.
"""

from __future__ import annotations

import faulthandler
import struct
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import numpy as np
import pyarrow as pa
from tests.codec import pgoutput_messages as pg
from tests.codec.line_samples import same
from tests.codec.pgoutput_messages import TablesByOid
from tests.codec.reference_decoder import decode_plain
from tests.codec.reference_messages import UNCHANGED, decode_raw, parse_message
from tests.fuzz import checksums
from tests.fuzz.harness import MORE_MEMORY
from tests.fuzz.session_targets import decode_sessions, session_seeds, with_right_checksum
from tests.fuzz.shipment_targets import check_message, message_seeds, with_right_start
from tests.wal.truth import FOLDER, STREAM, Truth

from millstream.capture.copying import _text_scan as _copy_scan
from millstream.capture.copying.copy_output import CopyText, as_messages
from millstream.capture.copying.copy_text import read_copied
from millstream.codec.buffered_op import decode_op, encode_op
from millstream.codec.log_frame import (
    FrameKind,
    RecordsFrame,
    decode_frame,
    decode_frame_header,
    encode_loss_frame,
    frame_extent,
)
from millstream.codec.log_schemas import SchemaSet
from millstream.codec.log_segment import SegmentFooter, SegmentHeader, SegmentTotals
from millstream.codec.pgoutput import (
    MessageRun,
    RelationCache,
    StreamCommit,
    decode_spilled,
    decode_transactions,
    encode_raw,
    table_schema,
)
from millstream.codec.pgoutput._framing import split_copy_data, split_copy_rows
from millstream.codec.pgoutput.rare_messages import (
    Relation,
)
from millstream.config.file import load_config
from millstream.config.quantities import size_bytes
from millstream.errors import (
    CorruptFrame,
    HttpError,
    IngestError,
    InvalidValue,
    MillstreamError,
    PositionError,
    ProtocolViolation,
    ShipmentUnreadable,
    TableUndecodable,
    UnsupportedFormat,
    UsageError,
)
from millstream.ingest.arrow_stream_decoding import rows_of_arrow
from millstream.ingest.json_rows import columns_of, rows_of_json, rows_of_lines, valid_columns_of
from millstream.model.as_of_parsing import parse_as_of
from millstream.model.durations import duration_s
from millstream.model.exact_values import INEXACT, array_of, text_parser, text_renderer
from millstream.model.ids import Epoch, RegionId, ShardId, SourceId
from millstream.model.names import TablePattern, parse_qualified_name
from millstream.model.operations import FIRST_SHARD
from millstream.model.pgtypes import log_type, parse_lake_override
from millstream.model.positions import Lsn, StreamToken, parse_lsn
from millstream.model.record_json import to_json
from millstream.testing.files import MemoryFiles
from millstream.testing.write_buffer import application_op, every_kind_op
from millstream.wal.durable_mark import MarkFile, read_dropped, read_mark
from millstream.wal.mending.inspect import inspect, ls, stats, verify
from millstream.wal.reader import StreamReader
from millstream.wal.records_json import Cat
from millstream.wal.writing.recover import recover

GOLDEN: Final = sorted((Path(__file__).resolve().parents[1] / "golden").glob("*.wal"))
SHARD_DIR: Final = f"{FOLDER}/00000"


@dataclass(frozen=True)
class Target:
    """One decoder, or a few that take the same input."""

    seeds: Callable[[], list[bytes]]
    decode: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...]
    mend: Callable[[bytes], bytes] | None = None
    """A function that corrects checksums; without it no input gets far."""
    share: float = 1.0
    """Share of inputs that it gets, relative to a quick target."""

    def attempt(self, data: bytes) -> str | None:
        """Return what breaks the rule, its place first, or None if nothing does."""
        try:
            self.decode(data)
        except self.allowed:
            return None
        except BaseException as error:  # whatever it is
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
            return place + "\n" + "".join(traceback.format_exception(error)[-6:])
        return None


# --- the log ------------------------------------------------------------------------------------------------------------


def _written() -> MemoryFiles:
    """Return a small log of two shards; the first has several segments, and its last one is open."""
    truth, files = Truth(), MemoryFiles()
    log = truth.open(files)
    for _ in range(3):
        truth.commit(log, truth.ops([(1, 9), (2, 4)], [(3, 12)]))
    truth.commit(log, truth.spilled([(1, 40)], [(2, 3)]))
    truth.commit(log, truth.ops([(4, 3)]))
    log.abandon()
    return files


def _segments(files: MemoryFiles) -> list[bytes]:
    names = [name for name in files.listdir(SHARD_DIR) if name.endswith(".wal")]
    return [files.read(f"{SHARD_DIR}/{name}") for name in names]


def _frames(segment: bytes) -> bytes:
    """Return a segment's frames, without header and footer."""
    footer = SegmentFooter.decode_tail(lambda at, length: segment[at : at + length], len(segment))
    end = len(segment) if footer is None else footer.frames[-1].position + footer.frames[-1].length
    return segment[4096:end]


def _frame_seeds() -> list[bytes]:
    found = [_frames(segment) for segment in (*_segments(_written()), *(path.read_bytes() for path in GOLDEN))]
    header, length = decode_frame_header(found[-1])  # a schema frame; the loss may be of any group
    lost = replace(header, kind=FrameKind.LOSS, count=3, more=False)
    facts = {"why": "damaged", "offsets": [1000, 1003]}
    return [*found, b"".join(map(bytes, encode_loss_frame(lost, facts, length=length)))]


_PICKED: Final = frozenset({"id", "__commit_index", "__exact"})


def _decode_frames(data: bytes) -> None:
    schemas = SchemaSet()
    at = 0
    while at < len(data):
        extent = frame_extent(data[at : at + 16])
        frame = decode_frame(data[at : at + extent.length], schemas)
        if isinstance(frame, RecordsFrame):
            for table in frame.table_ids():
                for schema, records in frame.records(table, offsets=True, moments=True):
                    records.validate(full=True)
                    assert records.num_columns == len(schema.columns) + 12 + schema.partitioned
                for _, records in frame.records(table, columns=_PICKED):
                    records.validate(full=True)
        at += extent.length


def _decode_segment(data: bytes) -> None:
    header = SegmentHeader.decode(data)
    footer = SegmentFooter.decode_tail(lambda at, length: data[at : at + length], len(data))
    _look_at(_folder(data, header.base_offset))
    if footer is not None:
        assert all(frame.position >= 0 and frame.length > 0 for frame in footer.frames)
        totals = SegmentTotals.decode_tail(lambda at, length: data[at : at + length], len(data))
        assert totals is not None
        assert totals.records == sum(frame.count for frame in footer.frames if frame.kind is FrameKind.RECORDS)


def _folder(segment: bytes, base: int, mark: bytes | None = None) -> MemoryFiles:
    files = MemoryFiles()
    files.makedirs(SHARD_DIR)
    for path, data in ((f"{SHARD_DIR}/{base:020d}.wal", segment), (f"{SHARD_DIR}/durable.mark", mark)):
        if data is not None:
            file = files.create(path)
            file.pwrite(data, 0)
            file.sync()
    files.sync_dir(SHARD_DIR)
    return files


def _look_at(files: MemoryFiles, *, without_mark: bool = True) -> None:
    """Open a folder with tools, readers and recovery; each may refuse it."""
    for look in (
        lambda: ls(FOLDER, files=files),
        lambda: stats(FOLDER, files=files),
        lambda: list(inspect(FOLDER, files=files)),
        lambda: verify(FOLDER, files=files),
        lambda: _read(files, without_mark=without_mark),
        lambda: _read(files, without_mark=without_mark, on_damage=lambda _error: None),
        lambda: recover(files, FOLDER, stream=STREAM, region=RegionId(0), shards=[ShardId(0)], epoch=Epoch(9)),
    ):
        try:
            look()
        except (MillstreamError, CorruptFrame):
            continue


def _read(files: MemoryFiles, **options: Any) -> None:
    reader = StreamReader(FOLDER, files=files, **options)
    for line in Cat("shop", reader, "text").lines():
        to_json(line)
    spans = reader.spans(reader.first_seq() - 1, reader.persisted_upto())
    for span in spans:
        reader.parts_of(span)
        for _ in reader.read_span(span):
            continue
    reader.schemas()


def _mark_seeds() -> list[bytes]:
    files = _written()
    mark = MarkFile.open(files, SHARD_DIR)
    mark.close()
    return [files.read(f"{SHARD_DIR}/durable.mark"), bytes(4096), b""]


_MARKED: Final = _segments(_written())[0]


def _decode_mark(data: bytes) -> None:
    files = _folder(_MARKED, 0, data)
    _look_at(files, without_mark=False)
    read_mark(files, SHARD_DIR)
    read_dropped(files, SHARD_DIR)
    MarkFile.open(files, SHARD_DIR).close()


# --- pgoutput -----------------------------------------------------------------------------------------------------------

_TYPES: Final = (20, 21, 23, 16, 17, 25, 700, 701, 1082, 1114, 1184, 1700, 1231, 1005, 1009, 1185, 2950, 3802, 99999)
_TEXTS: Final = (
    "9223372036854775807", "-32768", "0", "t", "\\x00ff", "é\n", "1e+20", "-0", "2024-02-29", "2024-02-29 23:59:59.5",
    "0001-01-01 00:00:00+00", "12345678.90", "{1.50,NULL}", "{1,2}", '{a,"b\\"c",NULL}', '{"2024-01-01 00:00:00+00"}',
    "00000000-0000-0000-0000-000000000000", '{"a": 1}', "odd",
)  # fmt: skip
_MODIFIER: Final = ((10 << 16) | 2) + 4
_COLUMNS: Final = [(f"c{n}", oid, _MODIFIER if oid in {1700, 1231} else -1, n < 2) for n, oid in enumerate(_TYPES)]
_NULLS: Final = [None] * (len(_TYPES) - 2)


def _messages(xid: int | None = None) -> list[bytes]:
    """Return every kind of change, on three relations."""
    key = [*_TEXTS[:2], *_NULLS]
    toast = [*_TEXTS[:4], UNCHANGED, *_TEXTS[5:]]
    return [
        pg.type_(99999, "public", "mood", xid=xid),
        pg.relation(7, "public", "every", _COLUMNS, xid=xid),
        pg.relation(8, "", "full", _COLUMNS[:3], identity="f", xid=xid),
        pg.insert(7, _TEXTS, xid=xid),
        pg.update(7, toast, xid=xid),
        pg.update(7, _TEXTS, old_key=key, xid=xid),
        pg.update(8, _TEXTS[:3], old_row=["1", None, "2"], xid=xid),
        pg.delete(7, old_key=key, xid=xid),
        pg.delete(8, old_row=["1", "2", "3"], xid=xid),
        pg.truncate([7, 8], flags=3, xid=xid),
        pg.logical_message(77, "app", b"\xff\0", xid=xid),
        pg.origin(5, "elsewhere"),
    ]


def _message_seeds() -> list[bytes]:
    relation = parse_message(_messages()[1])
    assert isinstance(relation, Relation)
    streams = [
        b"S" + struct.pack(">IB", 7, 1), b"E", b"A" + struct.pack(">II", 7, 8), b"c" + struct.pack(">IBQQq", 7, 0, 1, 2, 3),
    ]  # fmt: skip
    return [
        *_messages(),
        *_messages(9),
        pg.begin(1, 2),
        pg.commit(1, 2),
        *streams,
        encode_raw(relation, _messages()[3]),
    ]


def _decode_message(data: bytes) -> None:
    for decode in (parse_message, lambda d: parse_message(d, streamed=True), decode_raw):
        try:
            decode(data)
        except ProtocolViolation:
            continue


def _pack(messages: list[bytes]) -> bytes:
    """Return a run as one input: each message after its length."""
    return b"".join(struct.pack("<H", len(message)) + message for message in messages)


def _unpack(data: bytes) -> list[bytes]:
    messages = []
    at = 0
    while at + 2 <= len(data):
        (length,) = struct.unpack_from("<H", data, at)
        messages.append(data[at + 2 : at + 2 + length])
        at += 2 + length
    return messages


def _run_seeds() -> list[bytes]:
    changes = _messages()
    alone = pg.logical_message(90, "alone", b"x", transactional=False)
    return [
        _pack(
            [
                pg.begin(100, 1),
                *changes,
                pg.commit(100, 120),
                alone,
                pg.begin(200, 2),
                *changes[3:],
                pg.commit(200, 210),
            ]
        ),
        _pack([pg.begin(100, 1), *changes[1:4], pg.commit(100, 120)]),
        _pack([pg.begin(1, 1), changes[2], *[pg.insert(8, [str(n), None, "7"]) for n in range(20)], pg.commit(2, 3)]),
    ]


def _both(messages: list[bytes]) -> None:
    """Check that machine code gives what the plain decoder gives, unless that refuses the run.

    Machine code needn't see what is wrong in the parts that are left out.
    """
    outcomes = []
    for decode, given in ((decode_plain, messages), (decode_transactions, MessageRun.of(messages))):
        try:
            ops = decode(given, TablesByOid(aside=[9]), RelationCache(), after=Lsn(0))  # type: ignore[operator]
            for table in ops.tables:
                table.rows.validate(full=True)
            tables = [(table.schema, repr(table.rows.to_pydict())) for table in ops.tables]
            outcomes.append((ops.reached, _facts(ops.operations), tables))
        except (ProtocolViolation, TableUndecodable):
            outcomes.append("refused")  # if a run is wrong in several ways, either error may come first
    assert outcomes[0] in (outcomes[1], "refused"), (
        f"plain: {str(outcomes[0])[:2000]}\nmachine code: {str(outcomes[1])[:2000]}"
    )


def _facts(batch: pa.RecordBatch) -> str:
    return repr(
        [
            column.cast(pa.int64() if pa.types.is_timestamp(column.type) else column.type).to_pylist()
            for column in batch.columns
        ]
    )


def _decode_run(data: bytes) -> None:
    _both(_unpack(data))


def _streamed_seeds() -> list[bytes]:
    return [_pack(_messages(9)), _pack(_messages(9) + _messages(10)[3:])]


def _decode_streamed(data: bytes) -> None:
    messages = _unpack(data)
    commit = StreamCommit(9, 0, Lsn(1), Lsn(2), 3)
    cut = len(messages) // 2
    runs = [MessageRun.of(messages[:cut]), MessageRun.of(messages[cut:])]
    op = decode_spilled(lambda: runs, TablesByOid(), RelationCache(), commit, aborted=[10])
    for tables in () if op is None else op.chunks():
        for table in tables:
            table.rows.validate(full=True)


def _wire_seeds() -> list[bytes]:
    payloads = [b"w" + bytes(24) + message for message in _messages()] + [b"k" + bytes(17)]
    rows = [b"\0\1" + struct.pack(">I", len(message)) + message for message in _messages()]
    chunk = [b"PGCOPY\n\xff\r\n\0" + bytes(8) + rows[0], *rows[1:], b"\xff\xff"]
    return [
        *(b"".join(b"d" + struct.pack(">I", len(p) + 4) + p for p in some) for some in (payloads, chunk)),
        as_messages(_COPY_TEXT.encode().split(b"\n")[:-1]).tobytes() + b"c\0\0\0\4",
    ]


def _decode_wire(data: bytes) -> None:
    buffer = np.frombuffer(data, np.uint8)
    room = len(data) // 5 + 1
    starts, ends, kinds = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.uint8)
    for split in (split_copy_data, split_copy_rows):
        found, at, _ = split(buffer, 0, len(data), starts, ends, kinds)
        assert 0 <= at <= len(data)
        for start, end in zip(starts[:found].tolist(), ends[:found].tolist(), strict=True):
            assert 0 <= start < end <= len(data)
    for begin in (0, len(data) // 2):
        at, _, rows, last = _copy_scan.walk_rows(buffer, begin, len(data))
        assert begin <= last <= at <= len(data)
        assert 0 <= rows <= len(data)


# --- texts --------------------------------------------------------------------------------------------------------------

_COPY_TEXT: Final = (
    "\t".join(t.replace("\\", "\\\\").replace("\n", "\\n") for t in _TEXTS)
    + "\n"
    + "\t".join(["\\N"] * len(_TEXTS))
    + "\n"
)


def _copy_seeds() -> list[bytes]:
    texts = [
        _COPY_TEXT.encode(),
        (_COPY_TEXT * 3).encode(),
        b"\\b\\f\\v\\r\\t\\\\" + b"\t\\N" * (len(_TEXTS) - 1) + b"\n",
    ]
    return texts + [as_messages(text.split(b"\n")[:-1]).tobytes() for text in texts]


_EVERY: Final = parse_message(_messages()[1])


def _decode_copy(data: bytes) -> None:
    """Decode bytes as the text of rows, and as their messages."""
    assert isinstance(_EVERY, Relation)
    schema = table_schema(_EVERY, source=SourceId(1))
    for rows in {data.count(b"\n"), 1, 0}:
        for messages in (as_messages(data.split(b"\n")[:rows]), np.frombuffer(bytearray(data), np.uint8)):
            try:
                copied = read_copied(CopyText(messages, rows, whole=True), _EVERY, schema)
            except (ProtocolViolation, TableUndecodable):
                continue
            copied.rows().validate(full=True)
            copied.key_list()


_KINDS: Final = sorted({log_type(oid, _MODIFIER if oid in {1700, 1231} else -1) for oid in _TYPES}, key=str)


def _value_seeds() -> list[bytes]:
    return [text.encode() for text in _TEXTS] + [
        b"Infinity",
        b"NaN",
        b"-infinity",
        b"{}",
        b"{{1},{2}}",
        b"[0:1]={1,2}",
        b"1.5e-300",
    ]


def _decode_value(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    for kind in _KINDS:
        value = text_parser(kind)(text)
        if value is not INEXACT:
            assert text_renderer(kind)(value) == text
            array_of([value], kind).validate(full=True)


def _position_seeds() -> list[bytes]:
    texts = [
        "5f0c21aa.s1024",
        "5f0c21aa.m5~1.7~2.9",
        "16/B374D848",
        "2026-03-01T12:30",
        "2026-03-01 12:30:00+01:00",
        "10m ago",
        "now",
    ]
    texts += [
        'public."My.Table"',
        "!public.audit_*",
        "decimal(38,9)",
        "500ms",
        "64MiB",
        "20%",
        "5f0c21aa.m0~" + "1.1~" * 9 + "2.2",
    ]
    return [text.encode() for text in texts]


def _decode_position(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    now = datetime(2026, 11, 21, tzinfo=UTC)
    stream = UUID("5f0c21aa-0000-4000-8000-000000000001")
    for parse in (
        StreamToken.parse, parse_lsn, parse_qualified_name, TablePattern.parse, parse_lake_override,
        lambda t: parse_as_of(t, stream, now=now),  # type: ignore[arg-type]
    ):  # fmt: skip
        try:
            found = parse(text)
            assert not isinstance(found, StreamToken) or StreamToken.parse(str(found)) == found
        except (PositionError, InvalidValue, UsageError):
            continue
    for parse in (duration_s, lambda t: size_bytes(t, whole=100)):
        try:
            parse(text)
        except ValueError as error:
            if "is not" not in str(error) and "can't be" not in str(error):
                raise


_CONFIG: Final = """
# a home
[streams.shop.source]
dsn = "postgresql://app:${SHOP_PASSWORD}@localhost/shop"
tables = ["public.*", "!public.audit_*"]
[streams.shop.lake]
views = ["current", "history", "scd2"]
[streams.shop.lake.storage_options]
"AWS_REGION" = 'x'
[streams.shop.types]
"public.orders.total" = "decimal(38,9)"
[streams.shop.log]
retention_age = "7d"
retention_bytes = "20%"
shards = 2
[streams.shop.shards]
"public.big" = 1
[spark]
master = "local[*]"
conf = { "spark.driver.memory" = "2g", 'a.b' = '''
x''' }
[http]
listen = "127.0.0.1:8787"
"""


def _config_seeds() -> list[bytes]:
    return [_CONFIG.encode(), b"\xef\xbb\xbf[http]\r\nlisten = '''localhost:1''' # a\r\n", b'http.listen = "[::1]:1"\n']


def _decode_config(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "millstream.toml"
        file.write_bytes(data)
        loaded = load_config(file, {"SHOP_PASSWORD": "p@ss"})
        for _ in loaded.effective():
            continue


# --- lines --------------------------------------------------------------------------------------------------------------


def _line_seeds() -> list[bytes]:
    line = b'cpu,host=a\\ b,region=e\\,u u=-12.5e-3,n=3i,k=7u,ok=true,s="x \\"q\\" \\\\\ny" 1700000000000000001\r\n'
    return [
        line,
        line * 3 + b"# a comment\n\n \t\nmem,host=b free=1,used=2i\nmem free=2i -1\n" + line.replace(b",n=3i", b""),
        b"m f=123456789012345678901234567890,g=4.9406564584124654e-324,h=9007199254740993 0\n",
        b'm,t=1,t=2 f=1\nm v=nan,msg="evil\nadmin x=1\n"\nm,T=\xc3\xa9 f=t\nm,t=1 f=T\nm s="no end\n',
    ]


def _decode_lines(data: bytes) -> None:
    """Check that machine code and the oracle give the same, whatever is wrong."""
    same(data)
    same(data, "s", columns_max=2, rejected_max=2)


LOG_ERRORS: Final = (MillstreamError,)


def _operation_seeds() -> list[bytes]:
    return [encode_op(every_kind_op()), encode_op(application_op(partition="p"))]


def _decode_operation(data: bytes) -> None:
    encode_op(decode_op(data, FIRST_SHARD))


def _body_seeds() -> list[bytes]:
    table = pa.table(
        {
            "n": [1, 2, None],
            "t": ["a", "é", None],
            "l": [[1.5], [], None],
            "s": [{"x": [1]}, {"x": []}, None],
            "d": pa.array(["a", "b", "a"]).dictionary_encode(),
            "v": pa.array(["a", "a text that stands elsewhere", None], pa.string_view()),
            "r": pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array(["q", "w"])),
        }
    )
    seeds = [b'{"a": 1, "b": [1.5, null], "c": {"d": "\\u00e9"}}\n{"a": -2}\n', b'[{"a": true}, {"a": null, "b": 1e9}]']
    for compression in (None, "lz4", "zstd"):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as out:
            out.write_table(table)
        seeds.append(bytes(sink.getvalue()))
    return seeds


def _decode_body(data: bytes) -> None:
    """Decode a request's body, as each content type that a request may name."""
    for decode in (rows_of_lines, rows_of_json):
        with suppress(HttpError, InvalidValue, IngestError):
            columns_of(decode(data)).validate(full=True)
        with suppress(HttpError, InvalidValue, IngestError):
            valid_columns_of(decode(data))
    with suppress(HttpError, InvalidValue, IngestError):
        rows_of_arrow(data).to_pylist()


TARGETS: Final = {
    "body": Target(_body_seeds, _decode_body, ()),
    "frames": Target(_frame_seeds, _decode_frames, (CorruptFrame, UnsupportedFormat), checksums.of_frames),
    "segment": Target(lambda: [*_segments(_written()), *(path.read_bytes() for path in GOLDEN)], _decode_segment, LOG_ERRORS, checksums.of_segment, 0.15),
    "operation": Target(_operation_seeds, _decode_operation, (CorruptFrame, UnsupportedFormat), checksums.of_operation),
    "mark": Target(_mark_seeds, _decode_mark, LOG_ERRORS, checksums.of_mark, 0.05),
    "sessions": Target(session_seeds, decode_sessions, LOG_ERRORS, with_right_checksum),
    "shipment": Target(message_seeds, check_message, (ShipmentUnreadable,), with_right_start),
    "message": Target(_message_seeds, _decode_message, ()),
    "run": Target(_run_seeds, _decode_run, ()),
    "streamed": Target(_streamed_seeds, _decode_streamed, (ProtocolViolation, TableUndecodable)),
    "wire": Target(_wire_seeds, _decode_wire, ()),
    "copy": Target(_copy_seeds, _decode_copy, ()),
    "value": Target(_value_seeds, _decode_value, ()),
    "position": Target(_position_seeds, _decode_position, ()),
    "lines": Target(_line_seeds, _decode_lines, ()),
    "config": Target(_config_seeds, _decode_config, (MillstreamError,)),
}  # fmt: skip


def _count_the_stars(data: bytes) -> None:
    """Break the rule in the way that the input names, if it has enough stars."""
    stars = data.count(b"*")
    if stars >= 3 and data.startswith(b"crash"):
        faulthandler._sigsegv()
    while stars >= 3 and data.startswith(b"hang"):
        continue
    if stars >= 3 and data.startswith(b"memory"):
        bytearray(MORE_MEMORY)
    if stars >= 3:
        raise IndexError(stars)


PLANTED: Final = {
    f"planted-{way}": Target(lambda way=way: [way.encode() + b"**"], _count_the_stars, ())  # type: ignore[misc]
    for way in ("raise", "memory", "crash", "hang")
}
"""Decoders that break the rule, for the test that the harness finds them."""

"""Read a Millstream log from its folder alone, with Python's standard library and pyarrow (for Arrow IPC and its LZ4).

    python examples/read_log.py data/wal/shop [--without-mark]

It imports nothing of Millstream: this is docs/internals/FORMAT.md in code, a pattern for a reader in another
language. It checks every checksum and the chain of segments. On damage it ends with exit code 3, and the lines
printed before are right.

Prints the same as `millstream wal cat --values text`. Two things in a line aren't in the log: the stream's name
is the folder's, and a schema or table that is called like a keyword (`public."order"`) stands without its
quotes, because PostgreSQL's list of keywords isn't here.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
import sys
from collections import namedtuple
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import ipc

Header = namedtuple("Header", "magic crc version zero stream region shard epoch base previous created ops batches")
Trailer = namedtuple("Trailer", "crc length end_offset count heads_hash magic")
Head = namedtuple(
    "Head",
    "length crc head_length version kind flags offset count first_seq last_seq group_last_seq reserved group epoch hybrid"
    " region shard writer shards sources parts ops batches",
)
Part = namedtuple("Part", "table version rows length crc flags", defaults=(0,))
Mark = namedtuple(
    "Mark",
    "magic crc version zero counter stream writer epoch base byte_end end_offset group upto reserved elsewhere gone",
    defaults=(math.inf, False),
)
Shown = namedtuple(
    "Shown",
    "magic crc version zero counter stream writer epoch base byte_end end_offset group upto reserved elsewhere gone required",
)
Dropped = namedtuple("Dropped", "magic crc version zero counter seq offset")
HEADER, TRAILER, HEAD = (
    struct.Struct("<8sIHH16sIIqq32sqII"),
    struct.Struct("<IIqq32s8s"),
    struct.Struct("<IIIBBH9q3I2H3I"),
)
HEAD_V1, PART_V1 = struct.Struct("<IIIBBH9qI2H3I"), struct.Struct("<q4I")  # without region and shard, without flags
PART, MARK, DROPPED = struct.Struct("<q5I"), struct.Struct("<8sIHHQ16si7q"), struct.Struct("<8sIHHQqq")
SHARED_MARK = struct.Struct(f"{MARK.format}q?")  # of a writer that shares its stream with others
SHOWN = struct.Struct(f"{MARK.format}q??")
PREFIX = ["__offset", "__index", "__op", "__unchanged", "__exact", "__before"]  # and of a partitioned table:
PARTITION = "__partition_oid"
NUMBERS = 1  # a flag of parts
LEFT_OUT = {NUMBERS: PREFIX[:2], 2: PREFIX[3:5], 4: PREFIX[5:]}  # the columns that parts with a flag don't have
SCHEMA, RECORDS, LOSS = 1, 2, 3  # kinds of frames
MORE = 1  # a flag of frames
COPY_CHUNK, MESSAGE = 2, 4  # kinds of operations
CRC_TABLE = list(range(256))
for _ in range(8):
    CRC_TABLE = [value >> 1 ^ (0x82F63B78 if value & 1 else 0) for value in CRC_TABLE]


class Damage(Exception):
    """Bytes that aren't in the format."""


def check(held: object, what: object) -> None:
    """Raise `Damage` unless the condition holds."""
    if not held:
        raise Damage(what)


def crc32c(*pieces: bytes) -> int:
    """Return the CRC32C, byte by byte; a fast reader takes the processor's instruction."""
    register = 0xFFFFFFFF
    for piece in pieces:
        for byte in piece:
            register = CRC_TABLE[(register ^ byte) & 0xFF] ^ register >> 8
    return register ^ 0xFFFFFFFF


# --- segments and frames ----------------------------------------------------------------------------------------------


class Frame(NamedTuple):
    """A frame whose checksums hold."""

    head: Head
    shards: tuple[int, ...]
    """The shards on which its group has frames, its own first."""
    directory: list[bytes]
    parts: list[tuple[Part, bytes]]
    end: int
    """Position after its last byte."""


class Segment:
    """A `.wal` file: its header and, if it is sealed, its footer."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, path.open("rb")
        self.size = self.file.seek(0, 2)
        head = self.read(0, 4096)
        check(len(head) == 4096 and head.startswith(b"MILLWAL\n"), f"{path} is no segment")
        self.header = header = Header(*HEADER.unpack_from(head))
        check(header.crc == crc32c(head[:8], head[12:]), f"{path}: the header fails its checksum")
        own = (2, int(path.stem), int(path.parent.name))
        check((header.version, header.base, header.shard) == own, f"{path} says that it is another")
        middle, end = HEADER.size + header.ops, HEADER.size + header.ops + header.batches
        self.directory = [ipc.read_schema(pa.py_buffer(m)) for m in (head[HEADER.size : middle], head[middle:end])]
        self.trailer = self.footer_hash = None
        trailer = self.read(self.size - TRAILER.size, TRAILER.size)
        if self.size >= 4096 + TRAILER.size and trailer.endswith(b"MILLEND\n"):
            self.trailer = Trailer(*TRAILER.unpack(trailer))
            self.frames_end = self.size - TRAILER.size - self.trailer.length
            check(self.frames_end >= 4096, f"{path}: the footer's length can't be")
            index = self.read(self.frames_end, self.trailer.length)
            check(self.trailer.crc == crc32c(index, trailer[4:]), f"{path}: the footer fails its checksum")
            self.footer_hash = hashlib.sha256(index + trailer).digest()
            self.index = ipc.open_stream(index).read_all().to_pylist()

    def read(self, position: int, length: int) -> bytes:
        """Return that many bytes; fewer if the file ends."""
        self.file.seek(max(position, 0))
        return self.file.read(length)

    def frames(self, end: int) -> Iterator[Frame]:
        """Yield the frames up to a byte. `Damage` at the first that doesn't follow on."""
        position, offset, heads, index = 4096, self.header.base, hashlib.sha256(), []
        while position < end:
            frame = self.frame(position, offset)
            yield frame
            heads.update(self.read(position, frame.head.head_length))
            index.append((offset, frame.head.count, position, frame.head.length))
            position, offset = frame.end, offset + frame.head.count
        if self.trailer is not None and end == self.frames_end:
            told = [(entry["offset"], entry["count"], entry["position"], entry["length"]) for entry in self.index]
            facts = (self.trailer.end_offset, self.trailer.count, self.trailer.heads_hash)
            found = (offset, offset - self.header.base, heads.digest())
            check((told, facts) == (index, found), f"{self.path}: footer and frames disagree")

    def frame(self, position: int, offset: int) -> Frame:
        """Return the frame at a byte."""
        where = f"{self.path}, byte {position}"
        start = self.read(position, HEAD.size)
        check(len(start) == HEAD.size, f"{where}: the file ends")
        layout = HEAD_V1 if start[12] == 1 else HEAD
        fields = layout.unpack(start[: layout.size])
        head = Head(*(fields if layout is HEAD else (*fields[:15], 0, 0, *fields[15:])))
        check(layout.size <= head.head_length <= head.length <= self.size - position, f"{where}: no frame")
        data = self.read(position, head.head_length)
        check(head.crc == crc32c(data[:4], data[8:]), f"{where}: the head fails its checksum")
        known = head.version in {1, 2} and not head.flags & ~MORE and head.kind in {SCHEMA, RECORDS, LOSS}
        check(known, f"{where}: unknown version")
        own = (self.header.region, self.header.shard, self.header.epoch, offset)
        check((head.region, head.shard, head.epoch, head.offset) == own, f"{where}: it doesn't follow on")
        parts, behind = [], position + head.head_length
        first = layout.size + 4 * head.shards + 12 * head.sources
        of_part = PART_V1 if layout is HEAD_V1 else PART
        for part in (Part(*p) for p in of_part.iter_unpack(data[first : first + of_part.size * head.parts])):
            check(part.flags <= sum(LEFT_OUT), f"{where}: unknown flags of a part")
            parts.append((part, self.read(behind, part.length)))
            check(part.crc == crc32c(parts[-1][1]), f"{where}: the rows of table {part.table} fail their checksum")
            behind += part.length
        check(behind == position + head.length, f"{where}: the parts contradict the length")
        directory = data[-head.batches - head.ops :]
        others = struct.unpack_from(f"<{head.shards}I", data, layout.size)
        return Frame(head, (head.shard, *others), [directory[: head.ops], directory[head.ops :]], parts, behind)


# --- how far to read --------------------------------------------------------------------------------------------------


@dataclass
class Shard:
    """The readable part of a shard: segments up to one of them, and so many bytes of that one."""

    number: int
    segments: list[Path]
    first_offset: int = 0
    last_base: int = 0
    byte_end: int = 4096
    upto: int = 0


def newest(data: bytes, places: tuple[int, ...], layout: struct.Struct, kind: type) -> Any:
    """Return the newest of a mark's slots; None if none is valid."""
    slots = []
    for place in places:
        is_shared = layout is MARK and data[place + 12 : place + 14] == b"\2\0"
        form = SHARED_MARK if is_shared else layout
        piece = data[place : place + form.size]
        if len(piece) == form.size and piece.startswith(b"MILLMRK\n"):
            slot = kind(*form.unpack(piece))
            if slot.crc == crc32c(piece[12:]):
                check(slot.version == 1 + is_shared, "a mark of an unknown version")
                slots.append(slot)
    return max(slots, key=lambda slot: slot.counter, default=None)


def follow_marks(shards: list[Shard], folder: Path) -> int:
    """Read the marks; return the number up to which all of them show everything."""
    marks: dict[int, list[Mark]] = {}
    for shard in shards:
        file = folder / f"{shard.number:05}" / "durable.mark"
        data = file.read_bytes() if file.exists() else b""
        mark, dropped = newest(data, (0, 512, 1024), MARK, Mark), newest(data, (2048, 2560), DROPPED, Dropped)
        shown = newest(data, (1536, 3072, 3584), SHOWN, Shown)
        if shown and shown.required:  # other machines have to hold the readable part
            mark = Mark(*shown[:-1])
            mark = mark._replace(elsewhere=math.inf if mark.elsewhere < 0 else mark.elsewhere)
        check(mark or not shard.segments, f"{file} doesn't say how far to read: try --without-mark")
        if mark:
            shard.last_base, shard.byte_end = mark.base, mark.byte_end
            marks.setdefault(mark.writer, []).append(mark)
        shard.first_offset = dropped.offset if dropped else 0
    positions = {}
    for writer, own in marks.items():
        covered = min(mark.group for mark in own)
        positions[writer] = max(mark.upto for mark in own if mark.group == covered)
    living = [writer for writer, own in marks.items() if not all(mark.gone for mark in own)]
    asked = living or [writer for writer, position in positions.items() if position == max(positions.values())]
    elsewhere = [min(mark.elsewhere for mark in marks[writer]) for writer in asked]
    cuts = [*(positions[writer] for writer in asked), min(elsewhere) if living else max(elsewhere, default=0)]
    return int(min(cuts))


def follow_groups(shards: list[Shard]) -> int:
    """Find the end without marks: the last commit group that is there whole, on every shard that it names."""
    tails: dict[int, list[Frame]] = {}
    sealed: dict[int, int] = {}
    for shard in shards:
        for segment in map(Segment, shard.segments[-2:]):
            tail = tails[shard.number] = []
            shard.last_base, shard.byte_end = segment.header.base, 4096
            if segment.trailer is None:
                with suppress(Damage):  # after the last frame: the remains of a crash, or a write in progress
                    tail.extend(segment.frames(segment.size))
            elif segment.index:
                sealed[shard.number], shard.byte_end = segment.index[-1]["group"], segment.frames_end
                shard.upto = segment.index[-1]["group_last_seq"]
        shard.first_offset = int(shard.segments[0].stem) if shard.segments else 0

    def is_there(group: int, number: int) -> bool:
        ends = (frame.head.group == group and not frame.head.flags & MORE for frame in tails.get(number, []))
        return number not in tails or group <= sealed.get(number, 0) or any(ends)

    torn: dict[int, float] = {}  # by writer: each numbers its own groups
    for head, on in ((frame.head, frame.shards) for tail in tails.values() for frame in tail):
        if not all(is_there(head.group, number) for number in on):
            torn[head.writer] = min(head.group, torn.get(head.writer, math.inf))
    for shard in shards:
        kept = [f for f in tails.get(shard.number, []) if f.head.group < torn.get(f.head.writer, math.inf)]
        if kept:
            shard.byte_end, shard.upto = kept[-1].end, kept[-1].head.group_last_seq
    return max((shard.upto for shard in shards), default=0)


# --- records ----------------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """A record as it is printed, and the keys by which shards are merged."""

    operation: tuple[Any, ...]
    first_seq: int
    """The operation's first number in the frame."""
    place: int
    facts: dict[str, Any]


def lines_of_shard(shard: Shard, stream: str, upto: int) -> Iterator[Line]:
    """Yield a shard's records in offset order."""
    expected, footer_hash = shard.first_offset, None
    for path in shard.segments:
        if not shard.first_offset <= int(path.stem) <= shard.last_base:
            continue
        segment = Segment(path)
        is_last = segment.header.base == shard.last_base
        check(segment.header.base == expected, f"{path}: offsets from {expected} on are missing in front of it")
        check(footer_hash in {None, segment.header.previous}, f"{path} doesn't follow on the segment before it")
        check(is_last or segment.trailer, f"{path} has no footer")
        schemas: dict[tuple[int, int], pa.Schema] = {}
        for frame in segment.frames(shard.byte_end if is_last else segment.frames_end):
            if frame.head.kind == SCHEMA:
                ((part, data),) = frame.parts
                schemas[part.table, part.version] = ipc.read_schema(pa.py_buffer(data))
            elif frame.head.kind == LOSS:
                pass  # these offsets will never be read
            elif frame.head.first_seq > upto:
                return
            else:
                yield from sorted(
                    lines_of_frame(frame, segment, schemas, stream), key=lambda line: line.facts["offset"]
                )
            expected = frame.head.offset + frame.head.count
        footer_hash = segment.footer_hash


def lines_of_frame(
    frame: Frame, segment: Segment, schemas: dict[tuple[int, int], pa.Schema], stream: str
) -> Iterator[Line]:
    """Yield a frame's records, table by table."""
    pairs = zip(frame.directory, segment.directory, strict=True)
    table, entries = (ipc.read_record_batch(pa.py_buffer(message), schema) for message, schema in pairs)
    times = table.column("commit_ts").cast(pa.int64()).to_pylist()
    operations, batches = table.select(["kind", "source", "commit_lsn", "xid"]).to_pylist(), entries.to_pylist()
    check(sum(batch["count"] for batch in batches) == frame.head.count, f"{segment.path}: a directory is wrong")
    for part, data in frame.parts:
        schema = schemas[part.table, part.version]
        facts = json.loads(schema.metadata[b"millstream.table"])
        left_out = {name for flag, names in LEFT_OUT.items() if part.flags & flag for name in names}
        there = pa.schema([field for field in schema if field.name not in left_out])
        rows = ipc.read_record_batch(pa.py_buffer(data), there)
        mine = [b for b in batches if (b["table_id"], b["schema_version"]) == (part.table, part.version)]
        numbers = [(b["operation"], b["first_seq"] + i) for b in mine for i in range(b["count"])]
        check(len(numbers) == rows.num_rows == part.rows, f"{segment.path}: rows of table {part.table} are missing")
        is_raw, is_message, names = (
            facts["kind"] == "raw",
            facts["kind"] == "messages",
            [c["name"] for c in facts["columns"]],
        )
        name = None if is_message else f"{quoted(facts['namespace'])}.{quoted(facts['name'])}"
        is_partitioned = facts.get("partitioned", False)
        leaves = rows.column(PARTITION).to_pylist() if is_partitioned else None
        own = rows.columns[len(PREFIX) - len(left_out) + is_partitioned :]
        values = list(zip(*(texts(column, utf8=is_message) for column in own), strict=True))
        made: dict[str, list[object]] = {column: [None] * part.rows for column in left_out}
        if part.flags & NUMBERS:
            of_mine = {b["operation"] for b in mine}
            is_numbered = all(b["first_index"] is not None for b in batches if b["operation"] in of_mine)
            check(is_numbered, f"{segment.path}: rows of table {part.table} have no numbers")
            firsts = first_offsets(batches, frame.head.offset)
            made["__index"] = [b["first_index"] + i for b in mine for i in range(b["count"])]
            made["__offset"] = [firsts[id(b)] + i for b in mine for i in range(b["count"])]
        prefixes = zip(*(made.get(name) or rows.column(name).to_pylist() for name in PREFIX), strict=True)
        for at, ((of, seq), (offset, index, code, unchanged, exact, before)) in enumerate(
            zip(numbers, prefixes, strict=True)
        ):
            kind, source, lsn, xid = operations[of].values()
            number = None if kind in {COPY_CHUNK, MESSAGE} else index
            op = "raw" if is_raw else chr(code)
            shown = set(facts["identity"] if op == "d" else names) - set(unchanged or ())
            row = {n: dict(exact or ()).get(n, v) for n, v in zip(names, values[at], strict=True) if n in shown}
            line = {
                "stream": stream, "shard": segment.header.shard, "epoch": segment.header.epoch, "offset": offset, "seq": seq, "op": op,
                "table": name, "source": source, "commit_lsn": None if lsn is None else f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:08X}",
                "commit_index": number,
                "commit_ts": None if times[of] is None or kind == COPY_CHUNK else moment(times[of], UTC).isoformat(),
                "xid": xid, "row": None if op == "t" else row, "before": None if before is None else dict(before),
                "unchanged": unchanged or [], "exact": dict(exact or ()),
            }  # fmt: skip
            if leaves is not None:
                line["partition_oid"] = leaves[at]
                if op == "x":
                    line |= {"row": {**dict(before or ()), "oid": leaves[at]}, "before": None}
            if facts["kind"] == "definition":
                columns = [
                    {"name": c["name"], "number": c.get("number", 0), "type": c["pg"] and c["pg"][2]}
                    for c in facts["columns"]
                ]
                renamed, filled = dict(before or ()), dict(exact or ())
                line |= {"row": {"columns": columns, "renamed": renamed, "filled": filled}, "before": None, "exact": {}}
            first = min(b["first_seq"] for b in batches if b["operation"] == of)
            operation = (segment.header.shard, first) if xid is None else (source, lsn, xid)
            yield Line(operation, first, -1 if number is None else number, line)


def first_offsets(batches: list[dict[str, Any]], offset: int) -> dict[int, int]:
    """Return the offset of each batch's first record, by the batch's `id`: offsets go by operation, then by index."""
    firsts = {}
    for batch in sorted(batches, key=lambda batch: (batch["operation"], batch["first_index"] or 0)):
        firsts[id(batch)], offset = offset, offset + batch["count"]
    return firsts


def merged(shards: list[Iterator[Line]]) -> Iterator[Line]:
    """Yield the lines of all shards: operations by their first number, the records of a transaction by their index."""
    heads = {number: line for number, lines in enumerate(shards) if (line := next(lines, None))}
    operation: tuple[Any, ...] | None = None
    while heads:
        if all(line.operation != operation for line in heads.values()):
            operation = min(heads.values(), key=lambda line: (line.first_seq, line.place)).operation
        same = [number for number, line in heads.items() if line.operation == operation]
        chosen = min(same, key=lambda number: heads[number].place)
        yield heads.pop(chosen)
        if line := next(shards[chosen], None):
            heads[chosen] = line


# --- values as PostgreSQL's text --------------------------------------------------------------------------------------


def texts(array: pa.Array, *, utf8: bool) -> list[str | None]:
    """Return each value as PostgreSQL prints it (a message's content as UTF-8, if it is); None for NULL."""
    kind = array.type
    if pa.types.is_list(kind):
        lists = [None if not value.is_valid else texts(value.values, utf8=utf8) for value in array]
        return [None if items is None else "{" + ",".join(map(element, items)) + "}" for items in lists]
    values = (array.cast(pa.int64()) if pa.types.is_timestamp(kind) else array).to_pylist()
    return [None if value is None else text(value, kind, utf8=utf8) for value in values]


def text(value: Any, kind: pa.DataType, *, utf8: bool) -> str:
    """Return one value as text."""
    if pa.types.is_timestamp(kind):
        written = moment(value).isoformat(" ")
        return (written.rstrip("0") if "." in written else written) + ("+00" if kind.tz else "")
    if pa.types.is_binary(kind):
        with suppress(UnicodeDecodeError):
            return str(value.decode() if utf8 else "\\x" + value.hex())
        return f"\\x{value.hex()}"
    if pa.types.is_boolean(kind):
        return "t" if value else "f"
    if pa.types.is_floating(kind):
        return float_text(value, pa.types.is_float32(kind))
    return format(value, "f") if isinstance(value, Decimal) else str(value)


def element(value: str | None) -> str:
    """Return an element of an array's text."""
    if value is None:
        return "NULL"
    plain = value and value.upper() != "NULL" and not re.search(r'[{}",\\ \t\n\r\v\f]', value)
    return value if plain else '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def float_text(value: float, is_real: bool) -> str:  # noqa: FBT001
    """Return the shortest digits that read back (but not those half-way to another number), as PostgreSQL does."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    size, as_float, as_bits = abs(value), *(("<f", "<i") if is_real else ("<d", "<q"))
    (bits,) = struct.unpack(as_bits, struct.pack(as_float, size))
    beside = [struct.unpack(as_float, struct.pack(as_bits, b))[0] for b in (bits - 1, bits + 1) if b >= 0]

    def is_half_way(digits: str) -> bool:
        return any(math.isfinite(b) and 2 * Fraction(digits) == Fraction(size) + Fraction(b) for b in beside)

    shortest = str(pa.scalar(size, pa.float32()).cast(pa.string())) if is_real else repr(size)
    if is_half_way(shortest):
        tries = [f"{size:.{precision}e}" for precision in range(17)]
        reading_back = (t for t in tries if struct.pack(as_float, float(t)) == struct.pack(as_float, size))
        shortest = next(digits for digits in reading_back if not is_half_way(digits))
    _, found, power = Decimal(shortest).as_tuple()
    digits = "".join(map(str, found)).rstrip("0") or "0"
    exponent = len(found) - 1 + int(power) if size else 0
    sign = "-" if math.copysign(1, value) < 0 else ""
    if -4 <= exponent < (6 if is_real else 15):
        return sign + format(Decimal(f"{digits}e{exponent - len(digits) + 1}"), "f")
    return f"{sign}{digits[0]}{'.' if digits[1:] else ''}{digits[1:]}e{'-' if exponent < 0 else '+'}{abs(exponent):02}"


def moment(micros: int, zone: Any = None) -> datetime:
    """Return a time from microseconds since 1970."""
    return datetime(1970, 1, 1, tzinfo=zone) + timedelta(microseconds=micros)


def quoted(name: str) -> str:
    """Return an identifier, quoted if it isn't plain."""
    return name if re.fullmatch(r"[a-z_][a-z0-9_]*", name) else '"' + name.replace('"', '""') + '"'


def main(arguments: list[str]) -> int:
    """Print a log; 3 if it is damaged."""
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        return 0
    without_mark = "--without-mark" in arguments
    named = [argument for argument in arguments if argument != "--without-mark"]
    if len(named) != 1 or named[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(named[0]).resolve()
    places = sorted(folder.glob("[!.]*"))
    strange = next((place for place in places if not re.fullmatch("[0-9]{5}", place.name)), None)
    if not places or strange:
        print(f"{strange or folder}: no {'shard of a log' if strange else 'log is here'}", file=sys.stderr)
        return 2
    shards = [Shard(int(place.name), sorted(place.glob("[!.]*.wal"))) for place in places]
    try:
        upto = follow_groups(shards) if without_mark else follow_marks(shards, folder)
        for line in merged([lines_of_shard(shard, folder.name, upto) for shard in shards]):
            print(json.dumps(line.facts, ensure_ascii=False, separators=(",", ":")))
    except Damage as damage:
        print(damage, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

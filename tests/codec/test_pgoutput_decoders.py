"""The vectorised decoder and the plain one give equal results for every run, as the rules of records ask."""

import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.codec import pgoutput_messages as pg
from tests.codec.pgoutput_checks import check_equal, decode
from tests.codec.pgoutput_messages import TablesByOid
from tests.codec.reference_decoder import decode_block_plain, decode_plain
from tests.codec.reference_messages import UNCHANGED, decode_raw
from tests.seeds import examples

from millstream.codec.pgoutput import (
    HEARTBEAT_PREFIX,
    MessageRun,
    RelationCache,
    decode_transactions,
)
from millstream.codec.pgoutput.transaction_decoder import decode_block
from millstream.errors import MillstreamError, ProtocolViolation, TableUndecodable
from millstream.model.operations import OPERATION_SCHEMA, WriteOps
from millstream.model.schema import TableKind

SLOW = settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))


# --- generated runs ------------------------------------------------------------------------------------------------

DIGITS = st.text("0123456789", min_size=1, max_size=20)
INTEGERS = st.integers(-(2**64), 2**64).map(str)
DATES = st.dates().map(str) | st.sampled_from(
    [
        "infinity",
        "-infinity",
        "0044-03-15 BC",
        "10000-01-01",
        "2023-02-29",
        "2024-02-29",
        "1900-02-29",
        "0001-01-01",
        "0000-01-01",
        "9999-12-31",
        "2024-13-01",
        "2024-00-10",
        "2024-1-01",
        "2024-01-0٣",
    ]
)
TIMES = st.datetimes().map(lambda t: str(t).rstrip("0") if t.microsecond else str(t)) | st.sampled_from(
    [
        "infinity",
        "2024-01-01 24:00:00",
        "2024-01-01 23:59:60",
        "2024-01-01 12:00:00.10",
        "0044-03-15 00:00:00 BC",
        "2024-01-01T12:00:00",
        "2024-01-01 12:00:00.",
        "12024-01-01 12:00:00",
        "2024-01-01 12:00",
        "2024-02-30 00:00:00",
    ]
)
FLOATS = (
    st.floats(width=32).map(repr)
    | st.floats().map(repr)
    | st.sampled_from(
        [
            "NaN",
            "Infinity",
            "-Infinity",
            "-0",
            "0",
            "1e+23",
            "1e+22",
            "9.007199254740993e+15",
            "1e-05",
            "0.0001",
            "1e+15",
            "100000000000000",
            "1e+06",
            "123456.7",
            "1.50",
            "inf",
            "nan",
            "1e5",
            "0x10",
            "3.4028235e+38",
            "1e400",
            "1E+20",
            ".5",
        ]
    )
)
ANY_TEXT = st.text(max_size=12)


@st.composite
def numerics(draw: st.DrawFn) -> str:
    whole = str(draw(st.integers(0, 10 ** draw(st.integers(0, 40)))))
    fraction = draw(st.sampled_from(["", ".00", ".25", ".5", ".123", ".000000000", ".7654321"]))
    return draw(st.sampled_from(["", "", "-", "0"])) + whole + fraction


def arrays_of(elements: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    plain = st.lists(elements | st.just("NULL"), max_size=4).map(lambda items: "{" + ",".join(items) + "}")
    return plain | st.sampled_from(
        ['{"a b",c}', "[0:1]={1,2}", "{{1,2},{3,4}}", "{}", '{"NULL",null}', '{"\\"",x}', "{1,"]
    )


def modifier(precision: int, scale: int) -> int:
    return ((precision << 16) | (scale & 0x7FF)) + 4


TYPES: dict[tuple[int, int], st.SearchStrategy[str]] = {
    (16, -1): st.sampled_from(["t", "f", "true", "", "x"]),
    (17, -1): st.binary(max_size=9).map(lambda data: "\\x" + data.hex())
    | st.sampled_from(["", "\\x0", "\\xAB", "abc"]),
    (20, -1): INTEGERS,
    (21, -1): st.integers(-40000, 40000).map(str) | DIGITS,
    (23, -1): st.integers(-(2**31) - 2, 2**31 + 2).map(str) | st.sampled_from(["-0", "+1", "01", "", "1_0", " 1", "٣"]),
    (25, -1): ANY_TEXT,
    (700, -1): FLOATS,
    (701, -1): FLOATS,
    (1082, -1): DATES,
    (1114, -1): TIMES,
    (1184, -1): TIMES.map(lambda text: text + "+00") | TIMES.map(lambda text: text + "+01"),
    (1700, -1): numerics(),
    (1700, modifier(12, 2)): numerics() | st.sampled_from(["NaN", "1e5", "-0.00", "00.10", ".50", "1.50", "0.05"]),
    (1700, modifier(38, 9)): numerics() | st.sampled_from(["NaN", "99999999999999999999999999999.999999999"]),
    (1700, modifier(2, 4)): st.sampled_from(["0.0099", "-0.0001", "0.0100", "0.00990", "1.0000"]),
    (1700, modifier(3, -2)): st.sampled_from(["99900", "-100", "100.0", "123456"]),
    (1700, modifier(50, 2)): numerics(),
    (1007, -1): arrays_of(st.integers(-(2**31), 2**31).map(str)),
    (1009, -1): arrays_of(st.text("abcN", min_size=1, max_size=4)),
    (1115, -1): arrays_of(TIMES.map(lambda text: f'"{text}"')),
    (1186, -1): st.just("1 mon 00:00:01"),
    (99999, -1): ANY_TEXT,
}
VALUES = {kind: st.none() | strategy | strategy | strategy for kind, strategy in TYPES.items()}


class Table:
    def __init__(self, oid: int, kinds: list[tuple[int, int]], keys: int, identity: str) -> None:
        self.oid = oid
        self.kinds = kinds
        self.identity = identity
        self.columns = [(f"c{n}", oid, mod, identity == "f" or n < keys) for n, (oid, mod) in enumerate(kinds)]

    def relation(self, xid: int | None = None) -> bytes:
        return pg.relation(self.oid, "public", f"t{self.oid}", self.columns, identity=self.identity, xid=xid)


@st.composite
def tables(draw: st.DrawFn, oid: int) -> Table:
    kinds = draw(st.lists(st.sampled_from(sorted(TYPES)), max_size=6))
    return Table(oid, kinds, draw(st.integers(0, 2)), draw(st.sampled_from("dnfi")))


@st.composite
def rows(draw: st.DrawFn, table: Table, *, toast: bool = False, key: bool = False) -> list[object]:
    values: list[object] = []
    for kind, column in zip(table.kinds, table.columns, strict=True):
        strategy = VALUES[kind]
        if toast:
            strategy = strategy | st.just(UNCHANGED)
        values.append(draw(strategy) if not key or column[3] else None)
    return values


@st.composite
def changes(draw: st.DrawFn, known: dict[int, Table], xid: int | None = None) -> bytes:
    kind = draw(st.sampled_from("iiuuuddtmh"))
    if kind == "m":
        return pg.logical_message(
            draw(st.integers(1, 99)), draw(ANY_TEXT.map(_no_zero)), draw(st.binary(max_size=9)), xid=xid
        )
    if kind == "h":
        return pg.logical_message(5, HEARTBEAT_PREFIX, b"beat", xid=xid)
    table = known[draw(st.sampled_from(sorted(known)))]
    if kind == "t":
        return pg.truncate(draw(st.lists(st.sampled_from(sorted(known)), max_size=4)), xid=xid)
    if kind == "i":
        return pg.insert(table.oid, draw(rows(table)), xid=xid)
    old = draw(st.sampled_from(["", "K", "O"]))
    if kind == "u":
        key = draw(rows(table, key=True)) if old == "K" else None
        row = draw(rows(table)) if old == "O" else None
        return pg.update(table.oid, draw(rows(table, toast=True)), old_key=key, old_row=row, xid=xid)
    if old == "K":
        return pg.delete(table.oid, old_key=draw(rows(table, key=True)), xid=xid)
    return pg.delete(table.oid, old_row=draw(rows(table, toast=True)), xid=xid)


def _no_zero(text: str) -> str:
    return text.replace("\0", "")


@st.composite
def runs(draw: st.DrawFn) -> list[bytes]:
    """Draw whole transactions of every kind of change, with relations that change in between."""
    known: dict[int, Table] = {}
    messages: list[bytes] = []
    lsn = 100
    for number in range(draw(st.integers(0, 5))):
        lsn += 100
        if draw(st.integers(0, 3)) == 0:
            prefix = draw(st.sampled_from([HEARTBEAT_PREFIX, "app", ""]))
            messages.append(pg.logical_message(lsn, prefix, draw(st.binary(max_size=5)), transactional=False))
            continue
        messages.append(pg.begin(lsn, 700 + number, ts_us=pg.START_TS_US + number))
        if draw(st.booleans()):
            messages.append(pg.origin(lsn, "elsewhere"))
        for _ in range(draw(st.integers(0, 6))):
            if not known or draw(st.integers(0, 4)) == 0:
                oid = draw(st.sampled_from([16401, 16402, 16403]))
                table = known[oid] if oid in known and draw(st.booleans()) else draw(tables(oid))
                if draw(st.booleans()):
                    messages.append(pg.type_(99999, "public", "Mood"))
                known[oid] = table
                messages.append(table.relation())
            messages.append(draw(changes(known)))
        messages.append(pg.commit(lsn, lsn + 50, ts_us=pg.START_TS_US + number))
    return messages


@SLOW
@given(
    messages=runs(),
    ignored=st.sets(st.sampled_from([16401, 16402, 16403])),
    message_records=st.booleans(),
    after=st.sampled_from([0, 250, 10_000]),
)
def test_both_decoders_agree_on_every_run(
    messages: list[bytes], ignored: set[int], *, message_records: bool, after: int
):
    decode(messages, TablesByOid(ignored=ignored, messages=message_records), after=after)


@SLOW
@given(runs(), st.sets(st.sampled_from([16401, 16402])))
def test_both_decoders_agree_on_tables_quarantined(messages: list[bytes], aside: set[int]):
    ops = decode(messages, TablesByOid(aside=aside))
    for table in ops.tables:
        if table.schema.kind is TableKind.RAW:
            for row in table.rows.to_pylist():
                relation, change = decode_raw(row["message"])
                assert relation.oid == table.schema.table_id
                assert type(change).__name__[0].lower() == {"c": "i", "u": "u", "d": "d", "t": "t"}[chr(row["__op"])]


@SLOW
@given(runs(), st.data())
def test_damaged_runs_raise_typed_errors_or_agree(messages: list[bytes], data: st.DataObject):
    if not messages:
        return
    number = data.draw(st.integers(0, len(messages) - 1))
    message = bytearray(messages[number])
    if data.draw(st.booleans()):
        del message[data.draw(st.integers(0, len(message) - 1)) :]
    else:
        place = data.draw(st.integers(0, len(message) - 1))
        message[place] ^= 1 << data.draw(st.integers(0, 7))
    damaged = [*messages[:number], bytes(message), *messages[number + 1 :]]
    results = []
    for decoder, run in ((decode_plain, damaged), (decode_transactions, MessageRun.of(damaged))):
        try:
            results.append(decoder(run, TablesByOid(), RelationCache()))
        except MillstreamError as error:
            assert isinstance(error, ProtocolViolation | TableUndecodable)  # noqa: PT017 — both outcomes are fine
            results.append(None)
    assert (results[0] is None) == (results[1] is None)
    if results[0] is not None:
        check_equal(*results)


@SLOW
@given(st.data())
def test_both_decoders_agree_on_streamed_blocks(data: st.DataObject):
    known = {16401: data.draw(tables(16401)), 16402: data.draw(tables(16402))}
    messages = [table.relation(xid=900) for table in known.values()]
    messages += [data.draw(changes(known, xid=data.draw(st.sampled_from([900, 901, 902])))) for _ in range(8)]
    aborted = data.draw(st.sets(st.sampled_from([901, 902])))
    results = []
    for decoder, run in ((decode_block_plain, messages), (decode_block, MessageRun.of(messages))):
        results.append(decoder(run, TablesByOid(), RelationCache(), streamed=True, aborted=aborted, first_index=7))
    assert results[0][1] == results[1][1]
    empty = pa.RecordBatch.from_pylist([], schema=OPERATION_SCHEMA)
    check_equal(WriteOps(empty, results[0][0]), WriteOps(empty, results[1][0]))

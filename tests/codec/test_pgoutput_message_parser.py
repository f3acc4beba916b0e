"""Single messages: every field is decoded, and damage gives nothing except a typed error."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.codec import pgoutput_messages as pg
from tests.codec.reference_messages import (
    UNCHANGED,
    Begin,
    Commit,
    Delete,
    Insert,
    Origin,
    StreamAbort,
    StreamStart,
    StreamStop,
    Truncate,
    Update,
    parse_message,
)

from millstream.codec.pgoutput import (
    LogicalMessage,
    Relation,
    RelationColumn,
    StreamCommit,
    Type,
)
from millstream.errors import ProtocolViolation
from millstream.model.schema import ReplicaIdentity

COLUMNS = [("id", 20, -1, True), ("name", 25, -1, False), ("amount", 1700, 786438, False), ("mood", 99999, -1, False)]
RELATION = pg.relation(16384, "public", "orders", COLUMNS, identity="i")
STREAM_COMMIT = b"c" + struct.pack(">IBQQq", 700, 0, 10, 20, 5)

SAMPLES = [
    pg.begin(7, 700),
    pg.commit(7, 9),
    pg.origin(7, "upstream"),
    RELATION,
    pg.type_(99999, "public", "mood"),
    pg.insert(16384, ["1", None, UNCHANGED, "t" * 300]),
    pg.update(16384, ["1", "a", "1.00", ""]),
    pg.update(16384, ["1", "a", "1.00", ""], old_key=["2", None, None, None]),
    pg.update(16384, ["1", "a", "1.00", ""], old_row=["2", "b", None, "x"]),
    pg.delete(16384, old_key=["1", None, None, None]),
    pg.delete(16384, old_row=["1", "b", None, "x"]),
    pg.truncate([16384, 16385], flags=3),
    pg.logical_message(55, "prefix", b"\x00\xff"),
    pg.logical_message(55, "prefix", b"", transactional=False),
    b"S" + struct.pack(">IB", 700, 1),
    b"E",
    STREAM_COMMIT,
    b"A" + struct.pack(">II", 700, 701),
]


def test_every_kind_of_message_comes_back_as_it_was_sent():
    assert [parse_message(data) for data in SAMPLES] == [
        Begin(7, pg.START_TS_US, 700),
        Commit(0, 7, 9, pg.START_TS_US),
        Origin(7, "upstream"),
        Relation(
            16384,
            "public",
            "orders",
            ReplicaIdentity.INDEX,
            (
                RelationColumn("id", 20, -1, in_identity=True, type_name="bigint"),
                RelationColumn("name", 25, -1, in_identity=False, type_name="text"),
                RelationColumn("amount", 1700, 786438, in_identity=False, type_name="numeric"),
                RelationColumn("mood", 99999, -1, in_identity=False, type_name="?"),
            ),
            RELATION,
        ),
        Type(99999, "public", "mood"),
        Insert(16384, (b"1", None, UNCHANGED, b"t" * 300)),
        Update(16384, (b"1", b"a", b"1.00", b"")),
        Update(16384, (b"1", b"a", b"1.00", b""), old_key=(b"2", None, None, None)),
        Update(16384, (b"1", b"a", b"1.00", b""), old_row=(b"2", b"b", None, b"x")),
        Delete(16384, old_key=(b"1", None, None, None)),
        Delete(16384, old_row=(b"1", b"b", None, b"x")),
        Truncate((16384, 16385), cascade=True, restart_identity=True),
        LogicalMessage(transactional=True, lsn=55, prefix="prefix", content=b"\x00\xff"),
        LogicalMessage(transactional=False, lsn=55, prefix="prefix", content=b""),
        StreamStart(700, first=True),
        StreamStop(),
        StreamCommit(700, 0, 10, 20, 5 + 946_684_800_000_000),
        StreamAbort(700, 701),
    ]


def test_changes_of_a_streamed_block_carry_their_transaction():
    streamed = [
        (pg.relation(16384, "public", "orders", COLUMNS, identity="i", xid=701), RELATION),
        (pg.type_(99999, "public", "mood", xid=701), pg.type_(99999, "public", "mood")),
        (pg.insert(16384, ["1"], xid=701), pg.insert(16384, ["1"])),
        (pg.update(16384, ["1"], xid=701), pg.update(16384, ["1"])),
        (pg.delete(16384, old_row=["1"], xid=701), pg.delete(16384, old_row=["1"])),
        (pg.truncate([1], xid=701), pg.truncate([1])),
        (pg.logical_message(5, "p", b"c", xid=701), pg.logical_message(5, "p", b"c")),
    ]
    for data, bare in streamed:
        message = parse_message(data, streamed=True)
        assert message.xid == 701
        plain = parse_message(bare)
        fields = [name for name in message.__slots__ if name != "xid"]
        assert [getattr(message, name) for name in fields] == [getattr(plain, name) for name in fields]


def test_a_relation_of_pg_catalog_is_named_so():
    message = parse_message(pg.relation(1, "", "pg_class", []))
    assert message.qualified_name == "pg_catalog.pg_class"


@pytest.mark.parametrize("data", SAMPLES, ids=lambda data: data[:1].decode())
def test_a_message_cut_anywhere_or_too_long_is_a_violation(data: bytes):
    for end in range(len(data)):
        with pytest.raises(ProtocolViolation):
            parse_message(data[:end])
    with pytest.raises(ProtocolViolation):
        parse_message(data + b"\0")


@given(data=st.sampled_from(SAMPLES), draw=st.data(), streamed=st.booleans())
def test_flipped_bytes_give_a_message_or_a_violation(data: bytes, draw: st.DataObject, *, streamed: bool):
    damaged = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 3))):
        damaged[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    try:
        parse_message(bytes(damaged), streamed=streamed)
    except ProtocolViolation as error:
        assert error.message  # noqa: PT017 — a message is fine too


@given(st.binary(max_size=60))
def test_any_bytes_give_a_message_or_a_violation(data: bytes):
    try:
        parse_message(data)
    except ProtocolViolation as error:
        assert error.message  # noqa: PT017 — a message is fine too

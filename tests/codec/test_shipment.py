"""Messages between a leader and its followers.

Every value comes back, golden bytes stay, and no damaged message is accepted.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.codec.checksums import crc32c
from millstream.codec.replication_messages import (
    START_SIZE,
    Message,
    decode_message,
    encode_message,
    message_size,
)
from millstream.errors import Diverged, FollowerBehindRetention, MillstreamError, ShipmentUnreadable
from millstream.model.ids import Epoch, GroupNumber, RegionId, ShardId, StreamId, WriterId
from millstream.model.marks import DroppedMark, DurableMark
from millstream.model.positions import Offset, Seq
from millstream.model.replication import (
    Acknowledgement,
    ByteEnd,
    Document,
    Hello,
    NodeName,
    SegmentPart,
    Shipment,
)

GOLDEN = Path(__file__).parent.parent / "golden" / "shipment-v1.bin"
STREAM = StreamId(UUID("5f0c21aa-0000-4000-8000-000000000001"))
INT63 = st.integers(0, 2**63 - 1)
U32 = st.integers(0, 2**32 - 1)
STREAMS = st.uuids().map(StreamId)
NODES = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True).map(NodeName)
POSITIONS = st.dictionaries(U32.map(ShardId), st.builds(ByteEnd, INT63.map(Offset), INT63), max_size=3)
MARKS = st.builds(
    DurableMark, STREAMS, st.integers(0, 2**31 - 1).map(WriterId), INT63.map(Epoch), INT63.map(Offset), INT63, INT63.map(Offset),
    INT63.map(GroupNumber), INT63.map(Seq), INT63.map(Seq), U32, st.none() | INT63.map(Seq), st.booleans(),
)  # fmt: skip
PARTS = st.builds(SegmentPart, U32.map(ShardId), INT63.map(Offset), INT63, st.binary(max_size=40), st.booleans())
SHIPMENTS = st.builds(
    Shipment,
    STREAMS,
    st.integers(0, 2**31 - 1).map(RegionId),
    INT63.map(Epoch),
    st.lists(PARTS, max_size=3).map(tuple),
    st.dictionaries(U32.map(ShardId), MARKS, max_size=2),
    st.dictionaries(U32.map(ShardId), st.builds(DroppedMark, INT63.map(Seq), INT63.map(Offset)), max_size=2),
    st.lists(st.builds(Document, st.text(max_size=8), INT63, st.binary(max_size=20)), max_size=2).map(tuple),
    INT63.map(Seq),
    INT63,
    NODES | st.just(NodeName("")),
    INT63,
    st.none() | st.dictionaries(U32.map(ShardId), MARKS, max_size=2),
    st.booleans(),
)
HELLOS = st.builds(
    Hello, st.none() | STREAMS, NODES, INT63.map(Epoch), POSITIONS, st.dictionaries(st.text(max_size=8), INT63, max_size=2),
    NODES | st.just(NodeName("")), st.text(max_size=16),
)  # fmt: skip
ACKNOWLEDGEMENTS = st.builds(
    Acknowledgement, NODES, INT63.map(Epoch), POSITIONS, INT63.map(GroupNumber), INT63.map(Seq), INT63, INT63, INT63,
    st.floats(allow_nan=False),
)  # fmt: skip
MESSAGES = SHIPMENTS | HELLOS | ACKNOWLEDGEMENTS


def encoded(message: Message) -> bytes:
    return b"".join(bytes(buffer) for buffer in encode_message(message))


@given(MESSAGES)
def test_what_is_decoded_is_what_was_said(message: Message):
    data = encoded(message)
    assert decode_message(data) == message
    assert message_size(data[:START_SIZE]) == len(data)


@given(MESSAGES, st.lists(st.integers(0, 400), max_size=4), st.integers(0), st.integers(0, 7))
def test_a_message_is_the_same_wherever_it_was_cut_in_pieces(message: Message, cuts: list[int], place: int, bit: int):
    data = encoded(message)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    assert decode_message(*(data[begin:end] for begin, end in pairwise(edges))) == message
    flipped = bytearray(data)
    flipped[place % len(data)] ^= 1 << bit
    with pytest.raises(ShipmentUnreadable):
        decode_message(*(flipped[begin:end] for begin, end in pairwise(edges)))
    with pytest.raises(ShipmentUnreadable):
        decode_message(*(data[begin:end] for begin, end in pairwise(edges)), b"\0")


@given(MESSAGES, st.integers(0), st.integers(0, 7))
def test_a_flipped_bit_is_found_wherever_it_is(message: Message, place: int, bit: int):
    data = bytearray(encoded(message))
    data[place % len(data)] ^= 1 << bit
    with pytest.raises(ShipmentUnreadable):
        decode_message(bytes(data))


@given(MESSAGES, st.integers(0))
def test_a_message_that_was_cut_is_refused(message: Message, length: int):
    data = encoded(message)
    with pytest.raises(ShipmentUnreadable):
        decode_message(data[: length % len(data)])
    with pytest.raises(ShipmentUnreadable):
        decode_message(data + b"\0")


@given(st.binary(max_size=200), st.integers(0, 5), st.integers(0, 60), st.booleans())
def test_bytes_that_pass_their_checksum_and_make_no_sense_are_refused_by_name(
    rest: bytes, kind: int, head: int, whole: bool
):
    head = len(rest) if whole else min(head, len(rest))
    tail = struct.pack("<HHIQ", 1, kind, head, len(rest) - head) + rest
    data = b"MSHP" + struct.pack("<I", crc32c(tail)) + tail
    with suppress(ShipmentUnreadable):
        assert encoded(decode_message(data))


def test_the_bytes_of_a_part_are_neither_copied_when_encoded_nor_when_decoded():
    body = bytes(range(256)) * 40
    shipment = Shipment(STREAM, RegionId(0), Epoch(1), (SegmentPart(ShardId(0), Offset(0), 0, body),))
    buffers = encode_message(shipment)
    assert buffers[1] is body
    data = b"".join(bytes(buffer) for buffer in buffers)
    found = decode_message(data)
    assert isinstance(found, Shipment)
    assert isinstance(found.parts[0].data, memoryview)
    assert found.parts[0].data.obj is data
    in_pieces = decode_message(*buffers)
    assert isinstance(in_pieces, Shipment)
    assert isinstance(in_pieces.parts[0].data, memoryview)
    assert in_pieces.parts[0].data.obj is body


@pytest.mark.parametrize(
    "error",
    [
        Diverged("other bytes", hint="Rebuild the follower.", shard=3, byte=4096),
        FollowerBehindRetention("too late", first=12),
        MillstreamError("odd"),
    ],
)
def test_an_error_arrives_as_the_error_that_it_was(error: MillstreamError):
    found = decode_message(encoded(error))
    assert type(found) is type(error)
    assert isinstance(found, MillstreamError)
    assert found.as_dict() == error.as_dict()


def test_another_version_is_refused_by_name():
    data = bytearray(encoded(Hello(None, NodeName("b"), Epoch(0), {})))
    data[8] = 9
    with pytest.raises(ShipmentUnreadable, match="version 9"):
        decode_message(bytes(data))


def golden() -> list[Message]:
    mark = DurableMark(
        STREAM, WriterId(1), Epoch(7), Offset(100), 8192, Offset(140), GroupNumber(12), Seq(300), Seq(1000), 2, Seq(5), True
    )  # fmt: skip
    return [
        Shipment(
            STREAM, RegionId(2), Epoch(7), (SegmentPart(ShardId(1), Offset(100), 4096, b"frames", is_end=True),),
            {ShardId(1): mark}, {ShardId(0): DroppedMark(Seq(9), Offset(4))}, (Document("catalog", 3, b"tables"),), Seq(300),
            1_750_000_000_000_000_000, NodeName("node-a"), 65_536, {ShardId(1): replace(mark, byte_end=6000, group=GroupNumber(11))},
            by_one=True,
        ),
        Hello(STREAM, NodeName("node-b"), Epoch(6), {ShardId(1): ByteEnd(Offset(100), 8192)}, {"sessions": 4}, NodeName("node-a")),
        Acknowledgement(
            NodeName("node-b"), Epoch(6), {ShardId(1): ByteEnd(Offset(100), 8192)}, GroupNumber(12), Seq(300), 17, 1, 2, 0.5
        ),
        Diverged("other bytes", hint="Rebuild the follower.", shard=3),
    ]  # fmt: skip


def test_golden_bytes():
    assert b"".join(encoded(message) for message in golden()) == GOLDEN.read_bytes()

"""Messages are found in a connection's bytes, wherever those were cut."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from millstream.codec.pgoutput import MessageRun
from millstream.codec.pgoutput._framing import MALFORMED, OTHER, WHOLE, split_copy_data, split_copy_rows

HEADER = b"w" + bytes(24)
KEEPALIVE = b"k" + bytes(17)

messages = st.lists(st.one_of(st.just(KEEPALIVE), st.binary(min_size=1, max_size=40).map(lambda m: HEADER + m)))


def frame(payload: bytes) -> bytes:
    return b"d" + struct.pack(">I", len(payload) + 4) + payload


def split(data: bytes, begin: int = 0, by: Any = split_copy_data) -> tuple[list[tuple[int, bytes]], int, int]:
    buffer = np.frombuffer(data, dtype=np.uint8)
    starts, ends, kinds = np.empty(64, np.int64), np.empty(64, np.int64), np.empty(64, np.uint8)
    count, at, why = by(buffer, begin, len(data), starts, ends, kinds)
    run = MessageRun(buffer, starts[:count], ends[:count])
    return list(zip(kinds[:count].tolist(), run, strict=True)), int(at), int(why)


def plain(payloads: list[bytes]) -> list[tuple[int, bytes]]:
    bodies = [payload if payload == KEEPALIVE else payload[len(HEADER) :] for payload in payloads]
    return [(body[0], body) for body in bodies]


@given(payloads=messages, cut=st.integers(0, 10_000))
def test_whole_messages_are_found_and_the_rest_waits(payloads: list[bytes], cut: int):
    payloads = payloads[:60]
    data = b"".join(map(frame, payloads))
    cut = min(cut, len(data))

    early, at, why = split(data[:cut])
    late, end, why_late = split(data, at)

    assert early + late == plain(payloads)
    assert (end, why, why_late) == (len(data), WHOLE, WHOLE)


def test_another_kind_of_frame_ends_the_walk_in_front_of_it():
    data = frame(HEADER + b"B1") + b"E" + struct.pack(">I", 5) + b"\0" + frame(HEADER + b"C1")
    found, at, why = split(data)
    assert found == [(ord("B"), b"B1")]
    assert data[at : at + 1] == b"E"
    assert why == OTHER


def test_what_no_server_sends_is_malformed():
    for payload in (HEADER, b"k" + bytes(3), b"x" + bytes(40), b""):
        assert split(frame(payload))[2] == MALFORMED, payload


COPY_HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
TRAILER = b"\xff\xff"
rows = st.lists(st.one_of(st.just(KEEPALIVE), st.binary(min_size=1, max_size=40).filter(lambda row: row[:1] != b"k")))


def copied(rows: list[bytes]) -> bytes:
    """Return what COPY … (FORMAT binary) sends for rows of one column."""
    payloads = [b"\0\1" + struct.pack(">I", len(row)) + row for row in rows] + [TRAILER]
    return b"".join(frame(COPY_HEADER * (number == 0) + payload) for number, payload in enumerate(payloads))


@given(copies=st.lists(rows, max_size=3), cut=st.integers(0, 10_000))
def test_rows_of_binary_copies_are_found_without_header_and_trailer(copies: list[list[bytes]], cut: int):
    copies = [copy[:20] for copy in copies]
    data = b"".join(map(copied, copies))
    cut = min(cut, len(data))

    early, at, why = split(data[:cut], by=split_copy_rows)
    late, end, why_late = split(data, at, by=split_copy_rows)

    assert early + late == [(row[0], row) for copy in copies for row in copy]
    assert (end, why, why_late) == (len(data), WHOLE, WHOLE)


def test_the_end_of_a_copy_ends_the_walk_and_rows_of_another_shape_are_malformed():
    data = copied([b"B1"])
    assert split(data + b"c\0\0\0\4", by=split_copy_rows) == ([(ord("B"), b"B1")], len(data), OTHER)
    for payload in (
        b"\0\2" + struct.pack(">I", 1) + b"B",
        b"\0\1" + struct.pack(">i", -1),
        b"\0\1" + struct.pack(">I", 2) + b"B",
        b"\0\1" + struct.pack(">I", 3) + b"k12",
        COPY_HEADER,
        b"\0",
        b"",
    ):
        assert split(frame(payload), by=split_copy_rows)[2] == MALFORMED, payload


@given(
    cuts=st.lists(st.lists(st.binary(max_size=9), max_size=5), max_size=6),
    in_one_buffer=st.booleans(),
)
def test_runs_joined_are_their_messages_in_order(cuts: list[list[bytes]], in_one_buffer: bool):
    expected = [message for some in cuts for message in some]
    if in_one_buffer:
        whole = MessageRun.of(expected)
        places = np.cumsum([0, *map(len, cuts)]).tolist()
        runs = [MessageRun(whole.buffer, whole.starts[a:b], whole.ends[a:b]) for a, b in itertools.pairwise(places)]
    else:
        runs = [MessageRun.of([b"header" + message for message in some], header_bytes=6) for some in cuts]
    assert list(MessageRun.joined(runs or [MessageRun.of([])])) == expected

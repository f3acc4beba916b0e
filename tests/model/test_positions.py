"""Positions: LSNs and tokens keep their text, and tokens are a lattice."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import InvalidValue, PositionError
from millstream.model.as_of_parsing import parse_moment
from millstream.model.ids import StreamId, WriterId
from millstream.model.positions import Lsn, Seq, SeqRange, StreamToken, format_lsn, parse_lsn
from millstream.testing.errors import coded

STREAM = StreamId(UUID("5f0c21aa-0d5e-4b7e-9c1e-0123456789ab"))
OTHER = StreamId(UUID("6f0c21aa-0d5e-4b7e-9c1e-0123456789ab"))
SEQS = st.integers(0, 40).map(Seq)
TOKENS = st.builds(
    StreamToken, st.just("5f0c21aa"), SEQS, st.dictionaries(st.integers(1, 4).map(WriterId), SEQS, max_size=4)
)


def test_an_lsn_reads_as_postgresql_prints_it() -> None:
    assert format_lsn(Lsn(0x16B374D848)) == "16/B374D848"
    assert format_lsn(Lsn(0x1000000A0)) == "1/000000A0"


@given(st.integers(0, 2**64 - 1).map(Lsn))
def test_an_lsn_survives_its_text(lsn: Lsn) -> None:
    assert parse_lsn(format_lsn(lsn)) == lsn


@pytest.mark.parametrize("text", ["", "16", "16/", "/1", "16/B374D8480", "x/1", "16/1 ", "16/1\n"])
def test_other_text_is_no_lsn(text: str) -> None:
    with pytest.raises(InvalidValue):
        parse_lsn(text)


def test_a_range_knows_its_last_number() -> None:
    assert SeqRange(Seq(5), 3).last == 7


@given(TOKENS)
def test_a_token_survives_its_text_and_a_pickle(token: StreamToken) -> None:
    assert StreamToken.parse(str(token), stream=STREAM) == token
    assert pickle.loads(pickle.dumps(token)) == token
    assert hash(StreamToken.parse(str(token))) == hash(token)


def test_a_scalar_token_reads_short() -> None:
    assert str(StreamToken.scalar(STREAM, Seq(1024))) == "5f0c21aa.s1024"
    assert str(StreamToken("5f0c21aa", Seq(7), {WriterId(2): Seq(9)})) == "5f0c21aa.m7~2.9"


@pytest.mark.parametrize(
    "text",
    ["", "s5", "5f0c21aa", "5f0c21aa.s", "5f0c21aa.s-1", "5f0c21aa.m5", "5f0c21aa.m5~1", "5f0c21aa.s5~1.6",
     "5F0C21AA.s5", "5f0c21aa.s5 ", "5f0c21aa.s99999999999999999999", "5f0c21aa.s010", "5f0c21aa.m10~1.5",
     "5f0c21aa.m10~1.15~1.16", "5f0c21aa.m10~2.15~1.16"],
)  # fmt: skip
def test_a_malformed_token_is_refused(text: str) -> None:
    with pytest.raises(PositionError, check=coded("invalid_token")):
        StreamToken.parse(text)


def test_a_refused_text_is_in_the_message_up_to_a_bound() -> None:
    text = "z" * 10_000
    with pytest.raises(PositionError) as token:
        StreamToken.parse(text)
    with pytest.raises(PositionError) as moment:
        parse_moment(text, now=datetime.now(UTC))
    assert max(len(caught.value.message) for caught in (token, moment)) < 200


def test_a_token_of_another_stream_is_refused() -> None:
    token = StreamToken.scalar(OTHER, Seq(1))
    with pytest.raises(PositionError, check=coded("invalid_token"), match="another stream"):
        StreamToken.parse(str(token), stream=STREAM)
    with pytest.raises(PositionError, check=coded("invalid_token")):
        token.join(StreamToken.scalar(STREAM, Seq(1)))


@given(TOKENS, TOKENS, st.integers(1, 5).map(WriterId))
def test_order_and_join_are_pointwise(a: StreamToken, b: StreamToken, writer: WriterId) -> None:
    assert a.join(b).of(writer) == max(a.of(writer), b.of(writer))
    assert a <= a.join(b)
    assert b <= a.join(b)
    assert (a <= b <= a) == (a == b)
    assert (a <= b) == (a.join(b) == b)


@given(TOKENS, TOKENS, st.integers(1, 5).map(WriterId))
def test_meet_is_pointwise(a: StreamToken, b: StreamToken, writer: WriterId) -> None:
    assert a.meet(b).of(writer) == min(a.of(writer), b.of(writer))
    assert a.meet(b) <= a
    assert a.meet(b) <= b
    assert (a <= b) == (a.meet(b) == a)
    assert a.meet(a.join(b)) == a == a.join(a.meet(b))


def test_tokens_are_only_partially_ordered() -> None:
    a = StreamToken("5f0c21aa", Seq(1), {WriterId(1): Seq(5)})
    b = StreamToken("5f0c21aa", Seq(1), {WriterId(2): Seq(5)})
    assert not a <= b
    assert not b <= a

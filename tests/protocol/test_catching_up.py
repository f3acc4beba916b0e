"""The choice between the ways of reading, and that the choice comes to rest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.model.positions import Lsn
from millstream.protocol.catch_up_mode import (
    CHUNK_CHANGES,
    CHUNK_WAL_BYTES,
    START_BYTES,
    BacklogChunk,
    CatchUpMode,
    Mode,
    ModeChoice,
)

MIB = 1 << 20


def chunk(begin: int, end: int, source_end: int, *, messages: int = 1000, size_bytes: int = MIB) -> BacklogChunk:
    return BacklogChunk(Lsn(begin), Lsn(end), Lsn(source_end), messages, size_bytes)


def begun(setting: CatchUpMode = CatchUpMode.AUTO, *, backlog: int = 100_000 * MIB, now: float = 0.0) -> ModeChoice:
    choice = ModeChoice(setting)
    choice.begin(reached=Lsn(0), source_end=Lsn(backlog), now=now)
    return choice


def streams(choice: ModeChoice, *, first: int, last: int, seconds: float, source_end: int, now: float) -> bool:
    """Stream between two positions; return whether to change then."""
    choice.begin(reached=Lsn(first), source_end=Lsn(source_end), now=now)
    assert choice.mode is Mode.STREAMING
    for passed in (first, first + 1):
        assert not choice.while_streaming(passed=Lsn(passed), source_end=Lsn(source_end), now=now)
    return choice.while_streaming(passed=Lsn(last), source_end=Lsn(source_end), now=now + seconds)


def test_a_small_backlog_is_streamed_and_a_large_one_read_in_chunks() -> None:
    assert begun(backlog=START_BYTES - 1).mode is Mode.STREAMING
    assert begun(backlog=START_BYTES).mode is Mode.CATCHING_UP
    assert begun(CatchUpMode.NEVER).mode is Mode.STREAMING
    assert begun(CatchUpMode.ALWAYS, backlog=1).mode is Mode.CATCHING_UP
    assert begun(CatchUpMode.ALWAYS, backlog=0).mode is Mode.STREAMING


def test_the_stream_is_read_once_the_rest_is_small() -> None:
    choice = begun()
    assert choice.after_chunk(chunk(0, 128 * MIB, 1000 * MIB), 1.0)
    assert not choice.after_chunk(chunk(128 * MIB, 990 * MIB, 1000 * MIB), 2.0)
    assert choice.begin(reached=Lsn(990 * MIB), source_end=Lsn(1200 * MIB), now=3.0) is Mode.STREAMING
    assert choice.begin(reached=Lsn(990 * MIB), source_end=Lsn(1200 * MIB), now=4.0) is Mode.CATCHING_UP, "only once"


def test_always_goes_over_to_the_stream_too() -> None:
    choice = begun(CatchUpMode.ALWAYS, backlog=10)
    assert not choice.after_chunk(chunk(0, 10, 10), 1.0)
    assert choice.begin(reached=Lsn(10), source_end=Lsn(20), now=2.0) is Mode.STREAMING


def test_the_stream_is_tried_where_chunks_would_go_on_for_long() -> None:
    choice = begun()
    assert choice.after_chunk(chunk(0, 500 * MIB, 100_000 * MIB), 9.0)
    assert not choice.after_chunk(chunk(500 * MIB, 600 * MIB, 100_000 * MIB), 11.0)
    assert choice.reason == "to see how fast the stream is"
    near = begun()
    assert near.after_chunk(chunk(0, 1000 * MIB, 1100 * MIB), 11.0), "the rest is done in a second"


def test_what_is_faster_is_kept() -> None:
    def tried(stream_mib: int) -> tuple[ModeChoice, bool]:
        choice = begun()
        assert not choice.after_chunk(chunk(0, 600 * MIB, 100_000 * MIB), 12.0)  # 50 MiB/s
        first = 600 * MIB
        last = first + 4 * stream_mib * MIB
        return choice, streams(choice, first=first, last=last, seconds=4.0, source_end=100_000 * MIB, now=13.0)

    choice, changes = tried(20)
    assert changes
    assert choice.begin(reached=Lsn(700 * MIB), source_end=Lsn(100_000 * MIB), now=17.0) is Mode.CATCHING_UP
    assert choice.after_chunk(chunk(700 * MIB, 1400 * MIB, 100_000 * MIB), 31.0), "faster, and known to be"
    assert not choice.after_chunk(chunk(1400 * MIB, 1401 * MIB, 100_000 * MIB), 131.0)
    assert choice.reason == "the stream is faster"
    _, changes = tried(48)
    assert not changes, "by less than a tenth"
    choice, changes = tried(80)
    assert not changes
    assert choice.begin(reached=Lsn(700 * MIB), source_end=Lsn(100_000 * MIB), now=18.0) is Mode.STREAMING
    assert choice.begin(reached=Lsn(700 * MIB), source_end=Lsn(100_000 * MIB), now=400.0) is Mode.CATCHING_UP, (
        "long ago"
    )


def test_a_stream_that_nothing_comes_of_is_not_measured() -> None:
    choice = begun(backlog=0)
    for at in range(20):
        assert not choice.while_streaming(passed=Lsn(5), source_end=Lsn(1000 * MIB), now=float(at))


def test_a_stream_that_keeps_up_is_left_alone() -> None:
    choice = begun(backlog=0)
    for at in range(20):
        assert not choice.while_streaming(passed=Lsn(at * MIB), source_end=Lsn((at + 10) * MIB), now=float(at))


def test_a_large_transaction_is_streamed_until_it_is_passed() -> None:
    for stuck in (
        chunk(0, MIB, 1000 * MIB, messages=CHUNK_CHANGES),
        chunk(0, 128 * MIB, 1000 * MIB, size_bytes=3 * CHUNK_WAL_BYTES + 1),
    ):
        for setting in (CatchUpMode.AUTO, CatchUpMode.ALWAYS):
            choice = begun(setting)
            assert not choice.after_chunk(stuck, 1.0)
            for reached, mode in ((128, Mode.STREAMING), (999, Mode.STREAMING), (1000, Mode.CATCHING_UP)):
                assert choice.begin(reached=Lsn(reached * MIB), source_end=Lsn(2000 * MIB), now=400.0) is mode
    choice = begun()
    assert choice.after_chunk(chunk(0, 64 * MIB, 1000 * MIB, messages=CHUNK_CHANGES), 0.5), "a full chunk that moved"


def test_what_was_refused_is_not_asked_for_again() -> None:
    choice = begun(CatchUpMode.ALWAYS)
    choice.give_up("no slot is free")
    assert choice.begin(reached=Lsn(0), source_end=Lsn(1000 * MIB), now=1000.0) is Mode.STREAMING
    assert not streams(choice, first=0, last=MIB, seconds=10, source_end=1000 * MIB, now=1001.0)


def test_connections_that_break_before_a_chunk_has_come_end_it() -> None:
    choice = begun()
    choice.broke()
    assert choice.begin(reached=Lsn(0), source_end=Lsn(1000 * MIB), now=1.0) is Mode.CATCHING_UP
    choice.after_chunk(chunk(0, 128 * MIB, 1000 * MIB), 2.0)
    choice.broke()
    assert not choice.given_up
    choice.broke()
    assert choice.given_up


@given(stream=st.floats(10, 500), chunks=st.floats(10, 500), writes=st.floats(0, 20), backlog=st.integers(0, 50_000))
def test_whatever_the_rates_the_end_is_reached_and_the_faster_way_does_most(
    stream: float, chunks: float, writes: float, backlog: int
) -> None:
    """A simulated source: both ways pass so many MiB a second, and the source writes more during it."""
    choice = ModeChoice(CatchUpMode.AUTO)
    now, passed, end = 0.0, 0.0, float(backlog)
    best = max(stream, chunks)
    if best < 2 * writes + 1:
        return
    spent = {Mode.STREAMING: 0.0, Mode.CATCHING_UP: 0.0}
    sessions = 0
    while end - passed >= 64 and sessions < 10_000:
        mode = choice.begin(reached=Lsn(int(passed * MIB)), source_end=Lsn(int(end * MIB)), now=now)
        sessions += 1
        goes_on = True
        while goes_on and end - passed >= 64:
            step = min(128 / chunks, (end - passed) / chunks) if mode is Mode.CATCHING_UP else 0.5
            begin = passed
            rate = chunks if mode is Mode.CATCHING_UP else stream
            passed, now, end = min(passed + rate * step, end), now + step, end + writes * step
            spent[mode] += step
            ends = Lsn(int(passed * MIB)), Lsn(int(end * MIB))
            if mode is Mode.CATCHING_UP:
                goes_on = choice.after_chunk(BacklogChunk(Lsn(int(begin * MIB)), *ends, 1000, MIB), now)
            else:
                goes_on = not choice.while_streaming(passed=ends[0], source_end=ends[1], now=now)
            assert now < 20 * (backlog + 100) / (best - writes) + 1000, "it never comes to an end"
    assert sessions < 10_000
    worse = Mode.STREAMING if chunks > stream else Mode.CATCHING_UP
    if max(stream, chunks) > 1.5 * min(stream, chunks):
        assert spent[worse] <= 0.2 * now + 70 + 256 / min(stream, chunks)

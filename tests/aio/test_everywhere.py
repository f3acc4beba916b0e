"""Every kind of home behaves alike: it takes rows of every type, returns the same rows, and refuses the same calls."""

from __future__ import annotations

import datetime as dt
import gc
import inspect
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from tests.aio.everywhere import WAYS, a_home
from tests.app.homes import make_home
from tests.app.served import serving

import millstream.aio
from millstream.errors import (
    InvalidValue,
    MillstreamError,
    UnknownStream,
    UsageError,
)
from millstream.testing.errors import coded

WEB = '[streams.web]\n[streams.web.keys]\n"public.users" = ["id"]\n'

NOON = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)
ROWS = [
    {"id": 1, "price": Decimal("1.50"), "at": NOON, "ok": True, "tags": ["a", "b"], "note": "x"},
    {"id": 2, "price": None, "at": NOON + dt.timedelta(seconds=1.5), "ok": None, "tags": None, "note": "ü"},
]
COLUMNS = pa.schema(
    [
        ("id", pa.int64()),
        ("price", pa.decimal128(12, 2)),
        ("at", pa.timestamp("us", "UTC")),
        ("ok", pa.bool_()),
        ("tags", pa.list_(pa.string())),
        ("note", pa.string()),
    ]
)
TABLE = pa.Table.from_pylist(ROWS, COLUMNS)

KINDS: dict[str, Callable[[], Any]] = {
    "dicts": lambda: ROWS,
    "a generator": lambda: (row for row in ROWS),
    "an Arrow table": lambda: TABLE,
    "an Arrow batch": lambda: TABLE.to_batches()[0],
    "an Arrow stream": TABLE.to_reader,
    "pandas": lambda: TABLE.to_pandas(types_mapper=pd.ArrowDtype),
    "polars": lambda: pl.from_arrow(TABLE),
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return make_home(tmp_path / "web", WEB)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def opened(home: Path, way: str) -> Iterator[Any]:
    if way.endswith("connect"):
        with serving(home) as url, a_home(way, url) as found:
            yield found
    else:
        with a_home(way, home) as found:
            yield found


def records(home: Any, table: str, **asks: Any) -> list[dict[str, Any]]:
    return [row for batch in home.read("web", table=table, **asks) for row in batch.to_pylist()]


@pytest.mark.sampled
def test_rows_of_every_kind_are_read_as_they_were_appended(opened: Any) -> None:
    for place, (kind, made) in enumerate(KINDS.items()):
        ack = opened.append("web", f"t{place}", made())
        assert (ack.row_count, ack.duplicate, ack.rejected) == (2, False, ()), kind
        found = records(opened, f"t{place}", upto=ack.token)
        assert [{name: row[name] for name in COLUMNS.names} for row in found] == ROWS, kind
        assert [row["__seq"] for row in found] == [ack.seqs.first, ack.seqs.last]
    one = opened.append("web", "users", {"id": 7})
    assert one.row_count == 1
    assert opened.token("web") == one.token
    (latest,) = opened.read_latest("web", "users")
    assert [row["id"] for row in latest.rows.to_pylist()] == [7]
    assert opened.streams() == ["web"]
    assert [stream["name"] for stream in opened.status()["streams"]] == ["web"]


def test_merged_rows_are_asked_for_by_a_time_as_a_text_too(opened: Any) -> None:
    opened.append("web", "users", [{"id": 1, "n": 7}])
    for at in ("2026-03-01T12:30", "10m ago", "now", NOON):
        assert opened.merged("web", "users", at=at).to_pylist() == [{"id": 1, "n": 7}]
    for at, code in (("soon", "invalid_time"), (str(opened.token("web")), "invalid_time"), (5, "usage")):
        with pytest.raises(MillstreamError, match=r"at is|soon", check=coded(code)):
            opened.merged("web", "users", at=at)


@pytest.mark.sampled
def test_several_tables_are_one_operation_with_rows_of_every_kind(opened: Any) -> None:
    tables = {f"t{place}": made() for place, made in enumerate(KINDS.values())}
    ack = opened.append_all("web", tables, idempotency_key="k")
    firsts = [part.first for part in ack.tables.values()]
    assert firsts == [firsts[0] + 2 * place for place in range(len(tables))]
    moments = set()
    for name in tables:
        found = records(opened, name, upto=ack.token)
        assert [{column: row[column] for column in COLUMNS.names} for row in found] == ROWS, name
        moments |= {row["__commit_ts"] for row in found}
    assert len(moments) == 1
    session = opened.session("web", "s")
    first = session.append_all({"a": [{"n": 1}], "b": [{"n": 2}]})
    again = session.append_all({"a": [{"n": 1}], "b": [{"n": 2}]}, number=1)
    assert (first.duplicate, again.duplicate, again.tables) == (False, True, first.tables)
    with pytest.raises(InvalidValue):
        opened.append_all("web", {"a": [{"n": 1}], "public.a": [{"n": 1}]})
    empty = opened.append_all("web", {"a": []})
    assert (empty.token, empty.row_count) == (opened.token("web"), 0)


def test_what_is_refused_is_refused_alike_and_the_next_goes_on(opened: Any) -> None:
    opened.append("web", "users", [{"id": 1, "n": 1}])
    for table, rows, error in (
        ("users", [{"id": None}], InvalidValue),
        ("users", [{"id": "x"}], InvalidValue),
        ("users", [], InvalidValue),
        ("users", [{"id": 1, "n": object()}], InvalidValue),
        ("a.b.c", [{"id": 1}], UsageError),
    ):
        with pytest.raises(error):
            opened.append("web", table, rows)
    with pytest.raises(UnknownStream):
        opened.append("shop", "users", {"id": 2})
    for asks in ({"session": "s"}, {"number": 1}, {"session": "s", "number": 1, "idempotency_key": "k"}):
        with pytest.raises((InvalidValue, UsageError)):
            opened.append("web", "users", {"id": 2}, **asks)
    kept = opened.append(
        "web", "users", [{"id": 2, "n": 1}, {"id": None, "n": 2}, {"id": 3, "n": 3}], keep_valid_rows=True
    )
    assert (kept.row_count, [(row.row, row.code) for row in kept.rejected]) == (2, [(1, "invalid_value")])
    assert [row["id"] for row in records(opened, "users")] == [1, 2, 3]


@pytest.mark.sampled
def test_what_is_sent_again_is_there_once(opened: Any) -> None:
    first = opened.append("web", "clicks", {"n": 1}, idempotency_key="order 1")
    again = opened.append("web", "clicks", {"n": 1}, idempotency_key="order 1")
    assert (again.duplicate, again.seqs, again.offsets) == (True, first.seqs, first.offsets)
    session = opened.session("web", "till 3")
    acks = [session.append("clicks", {"n": number}) for number in (2, 3)]
    with pytest.raises(InvalidValue):
        session.append("clicks", {"n": "text"})
    acks.append(session.append("clicks", {"n": 4}))
    assert session.next_number == 4
    late = opened.session("web", "till 3", next_number=3)
    assert late.append("clicks", {"n": 4}).seqs == acks[2].seqs
    assert late.append("clicks", {"n": 3}, number=2).duplicate
    assert not late.append("clicks", {"n": 5}).duplicate
    with pytest.raises(UsageError):
        opened.session("web", "till 3", next_number=0)
    assert [row["n"] for row in records(opened, "clicks")] == [1, 2, 3, 4, 5]


@pytest.mark.sampled
def test_many_append_at_once_and_each_is_there_once(opened: Any) -> None:
    def some(name: int) -> list[int]:
        return [
            opened.append("web", "clicks", [{"who": name, "n": n}, {"who": name, "n": -n}]).seqs.first
            for n in range(1, 40)
        ]

    with ThreadPoolExecutor(8) as threads:
        told = list(threads.map(some, range(8)))
    found = {row["__seq"]: (row["who"], row["n"]) for row in records(opened, "clicks")}
    assert len(found) == 8 * 39 * 2
    for name, firsts in enumerate(told):
        assert firsts == sorted(firsts)
        for n, first in enumerate(firsts, 1):
            assert (found[first], found[first + 1]) == ((name, n), (name, -n))


def test_an_iterator_that_is_left_holds_nothing_up(home: Path) -> None:
    import asyncio

    with millstream.open(home) as here:
        for number in range(30):
            here.append("web", "clicks", {"n": number})

        async def left(kind: Any) -> None:
            async with kind as there:
                async for _ in there.read("web"):
                    break
                assert await there.token("web") == here.token("web")
                assert len([batch async for batch in there.read("web")]) == len(list(here.read("web")))
                reading = asyncio.ensure_future(
                    there.query("select count(*) from range(100000000000) a, range(1000) b", stream="web")
                )
                await asyncio.sleep(0)
                reading.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reading
                assert (await there.append("web", "clicks", {"n": 99})).row_count == 1

        with serving(home) as url:
            asyncio.run(left(millstream.aio.open(home)))
            asyncio.run(left(millstream.aio.connect(url)))


def test_an_iterator_that_is_left_with_its_home_ends_without_an_error(home: Path) -> None:
    """asyncio closes it when the home is closed already, and logged an exception that nothing retrieves."""
    import asyncio

    with millstream.open(home) as here:
        start = here.append("web", "clicks", [{"n": 1}]).token
        here.append("web", "clicks", [{"n": 2}])

    problems: list[Any] = []

    async def left(*, follows: bool) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))
        async with millstream.aio.open(home) as there:
            async for _ in there.follow("web", after=start) if follows else there.read("web"):
                break

    for follows in (False, True):
        asyncio.run(left(follows=follows))
        gc.collect()
    assert problems == []


def test_all_have_the_same_calls() -> None:
    def said(call: Any) -> str:
        """Return a method's signature as its blocking counterpart would have it."""
        text = str(inspect.signature(call))
        text = re.sub(r"AsyncGenerator\[(.*), None\]", r"Iterator[\1]", text)
        return re.sub(r"Async(Session|Following|Consumers|Consumption)", r"\1", text)

    def public(kind: type) -> dict[str, str]:
        return {n: said(c) for n, c in inspect.getmembers(kind, inspect.isfunction) if not n.startswith("_")}

    wanted = public(millstream.RemoteHome)
    assert set(wanted) == {
        "streams",
        "token",
        "read",
        "follow",
        "read_latest",
        "merged",
        "append",
        "append_all",
        "query",
        "status",
        "session",
        "session_facts",
        "consumers",
        "consume",
        "close",
    }
    assert {
        name: call
        for name, call in public(millstream.OpenHome).items()
        if name not in {"lake", "reader", "check_age", "known_schemas", "merged_schema"}
    } == wanted
    assert public(millstream.aio.AsyncOpenHome) == wanted
    assert public(millstream.aio.AsyncRemoteHome) == wanted
    assert public(millstream.Session) == public(millstream.aio.AsyncSession)
    assert said(millstream.open).replace("OpenHome", "AsyncOpenHome") == said(millstream.aio.open)
    assert said(millstream.connect).replace("RemoteHome", "AsyncRemoteHome") == said(millstream.aio.connect)

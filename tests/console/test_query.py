"""SQL by the console: answers as a page and as CSV, and what is refused."""

from __future__ import annotations

import io
import re
from collections.abc import Generator, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.console.homes import filled_home, site_of
from tests.console.test_html import Seen

from millstream.console import query_page
from millstream.console.html import Content, escaped
from millstream.model.arrow_texts import rows_of_texts

OWN = {"origin": "http://127.0.0.1:8787"}
FROM_HISTORY = "SELECT id, '<b>' AS h, NULL AS n FROM history.\"public.orders\" ORDER BY id"


def parts_of(batches: list[pa.RecordBatch], sizes: list[int]) -> Generator[bytes, None, None]:
    """Yield an Arrow IPC stream in parts of some sizes."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batches[0].schema) as out:
        for batch in batches:
            out.write_batch(batch)
    data, at = sink.getvalue(), 0
    for size in sizes:
        yield data[at : at + size]
        at += size
    yield data[at:]


def shown(content: Content) -> bytes:
    return escaped(content).encode()


def test_a_table_with_merge_rules_is_known_by_its_merged_rows_too(tmp_path: Path) -> None:
    keys = '[streams.shop.keys]\n"public.orders" = ["id"]\n'
    home = filled_home(tmp_path / "home", f'{keys}[streams.shop.merge."public.orders"]\ntotal = "lww"\n')
    listed = [attributes for name, attributes in Seen(query_page.names(home, ["shop", "web"])).tags if name == "li"]
    assert ["data-merged" in one for one in listed] == [True, False, False]


@given(
    st.lists(st.lists(st.none() | st.text(st.characters(exclude_categories=("Cs", "Cc")))), min_size=1, max_size=4),
    st.lists(st.integers(0, 200), max_size=8),
)
def test_a_page_and_csv_have_every_row_in_whatever_parts_it_comes(
    columns: list[list[str | None]], sizes: list[int]
) -> None:
    batches = [pa.record_batch({"<x>": pa.array(column, pa.string())}) for column in columns]
    values = [value for column in columns for value in column]
    (page,) = query_page.as_page(shown, parts_of(batches, sizes))
    seen = Seen(page.decode())
    assert sum(name == "td" for name, _ in seen.tags) == len(values)
    assert {name for name, _ in seen.tags} <= {"section", "h2", "p", "div", "table", "thead", "tbody", "tr", "th", "td"}
    csv = b"".join(query_page.as_csv(parts_of(batches, sizes))).decode()
    assert csv.startswith("<x>\r\n")
    assert csv.count("\r\n") == len(values) + 1


def test_a_page_has_the_first_rows_and_says_so() -> None:
    closed = []

    def parts() -> Generator[bytes, None, None]:
        try:
            yield from parts_of([pa.record_batch({"n": pa.array(range(query_page.ROWS_SHOWN))})] * 3, [])
        finally:
            closed.append(True)

    (page,) = query_page.as_page(shown, parts())
    assert page.count(b"<td>") == query_page.ROWS_SHOWN
    assert b"The first 1,000 rows; there are more." in page
    assert closed, "the query goes on although no one waits for it"


def test_large_values_take_neither_the_server_s_memory_nor_a_page_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    values = pa.array(["x" * 5_000] * 400)
    batch = pa.record_batch({str(number): values for number in range(20)})
    made_bytes: list[int] = []

    def texts(some: pa.RecordBatch) -> Iterator[tuple[str | None, ...]]:
        made_bytes.append(some.nbytes)
        return rows_of_texts(some)

    monkeypatch.setattr(query_page, "rows_of_texts", texts)
    (page,) = query_page.as_page(shown, parts_of([batch], []))
    most = query_page._PAGE_MAX
    assert most < len(page) < most + 100_000
    assert b"x" * 2_000 + "… (5,000 characters".encode() in page
    assert re.search(rb"The first \d{3} rows; there are more\.", page)
    for_page = made_bytes.copy()
    made_bytes.clear()
    lines = list(query_page.as_csv(parts_of([batch], [])))
    assert b"".join(lines).count(b"x" * 5_000) == 8_000
    assert sum(for_page) < sum(made_bytes), "the page's query goes on although the page is full"
    assert max(for_page + made_bytes) <= query_page._BYTES_AT_ONCE


def test_who_asks_sql_gets_the_answer_or_the_error_in_the_page(tmp_path: Path) -> None:
    with site_of(filled_home(tmp_path / "home")) as site:
        page = site.get("/query")
        assert "public.orders (shop): id, total, note" in Seen(page.text).text
        assert "history" not in page.text
        answer = site.call("POST", "/query", OWN, stream="shop", sql=FROM_HISTORY, format="table")
        assert answer.status_code == 200, answer.text
        assert answer.headers["cache-control"] == "no-store"
        seen = Seen(answer.text)
        token = answer.headers["millstream-token"]
        assert f"31 rows. As of {token}" in seen.text
        again = site.call("POST", "/query", OWN, stream="shop", sql=FROM_HISTORY, as_of=token, format="table")
        assert "31 rows." in Seen(again.text).text
        assert FROM_HISTORY in seen.text, "the form keeps the query"
        assert not [name for name, _ in seen.tags if name == "b"]
        csv = site.call("POST", "/query", OWN, stream="shop", sql=FROM_HISTORY, format="csv")
        assert csv.headers["content-type"] == query_page.CSV_TYPE
        assert csv.headers["content-disposition"] == 'attachment; filename="query.csv"'
        assert csv.text.splitlines()[:2] == ["id,h,n", "0,<b>,"]
        for sql, status, code in (
            ("selec 1</textarea><b>", 400, "invalid_query"),
            ("DROP TABLE public.orders", 400, "invalid_query"),
        ):
            refused = site.call("POST", "/query", OWN, stream="shop", sql=sql, format="table")
            assert (refused.status_code, code in refused.text) == (status, True), refused.text
            assert not [name for name, _ in Seen(refused.text).tags if name == "b"]
            assert "\\n" not in Seen(refused.text).text, "a message of several lines has several lines"
        assert site.call("POST", "/query", OWN, stream="other", sql="SELECT 1").status_code == 404
        assert site.call("POST", "/query", OWN, stream="shop", sql="SELECT 1", as_of="<b>").status_code == 400
        assert site.call("POST", "/query", stream="shop", sql="SELECT 1").status_code == 403


def test_who_may_not_read_a_stream_asks_nothing_of_it(tmp_path: Path) -> None:
    with site_of(filled_home(tmp_path / "home", "[http]\ntokens_required = true\n")) as site:
        cookie = {"cookie": site.cookie("shop")}
        for stream in ("web", "*", ""):
            assert site.call("POST", "/query", OWN, stream=stream, sql="SELECT 1").status_code == 303
            assert site.call("POST", "/query", cookie | OWN, stream=stream, sql="SELECT 1").status_code == 403
        assert "web" not in site.call("GET", "/query", cookie).text
        assert site.call("POST", "/query", cookie, stream="shop", sql="SELECT 1").status_code == 303, "no origin"

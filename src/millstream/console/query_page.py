"""The page that asks SQL of a stream's tables, and the answers as a table and as CSV."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from millstream.console.html import Content, Html, grid, opened, tag
from millstream.model.arrow_texts import csv_field, rows_of_texts
from millstream.model.human_text import counted, human_bytes
from millstream.model.schema import TableKind
from millstream.serving.queries.frames import POSITION_HEADER

if TYPE_CHECKING:
    from millstream.config.serving_model import HttpConfig
    from millstream.home.home import Home

ROWS_SHOWN: Final = 1_000
CSV_TYPE: Final = "text/csv; charset=utf-8"
_VALUE_MAX: Final = 2_000
_PAGE_MAX: Final = 8 << 20
"""Characters of HTML after which a page has no more rows: the server holds them, and a browser shows them."""
_ROWS_AT_ONCE: Final = 256
_BYTES_AT_ONCE: Final = 4 << 20
"""Rows and bytes of them that are texts at one time: a batch of large values as texts takes several times its memory."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The fields of the form, as they were sent."""

    stream: str = ""
    sql: str = ""
    as_of: str = ""


def form(asked: Asked, streams: Sequence[str], limits: str) -> Html:
    """Return the form.

    Args:
        streams: names of the streams that the viewer may read.
        limits: the limits of a query, in words.
    """
    options = [tag("option", name, value=name, selected=name == asked.stream) for name in streams]
    place = "SELECT count(*) FROM public.orders"
    return tag(
        "form",
        tag("label", "Stream ", tag("select", *options, name="stream")),
        tag(
            "label",
            "As of ",
            tag("input", name="as_of", value=asked.as_of, placeholder="now; 10m ago; a token", size=28),
        ),
        tag(
            "label",
            "SQL",
            # The element's first line break isn't part of its text.
            Html(opened("textarea", name="sql", rows=6, spellcheck="false", required=True, placeholder=place) + "\n"),
            Html(escape(asked.sql.replace("\0", "")) + "</textarea>"),
            class_="wide",
        ),
        tag("button", "Run", type="submit", name="format", value="table"),
        tag("button", "Get all rows as CSV", type="submit", name="format", value="csv"),
        tag("p", limits, class_="note wide"),
        method="post",
        action="/query",
        class_="row",
    )


def limits_in_words(http: HttpConfig) -> str:
    """Return what bounds a query."""
    return (
        f"It only reads, and shows {ROWS_SHOWN:,} rows at most. A query may take {http.query_timeout}, "
        f"{http.query_memory_bytes_max} of memory and {http.query_spill_bytes_max} of disk; {http.queries_max} run at a time."
    )


def names(home: Home, streams: Sequence[str]) -> Html:
    """Return the tables that a query can name, with their columns. Blocks."""
    with home.open_catalog() as catalog:
        known = {row.name: row.id for row in catalog.streams()}
        found = [
            (name, schema)
            for name in streams
            if name in known
            for schema in sorted(catalog.latest_schemas(known[name]).values(), key=lambda one: one.full_name)
            if schema.kind is TableKind.TABLE
        ]
    merges = {name: config.merge for name, config in home.config.streams.items()}
    items = [
        tag(
            "li",
            tag("code", schema.full_name),
            f" ({name}): {', '.join(columns)}",
            data_stream=name,
            data_table=schema.full_name,
            data_columns=json.dumps(columns),
            data_merged=schema.full_name in merges.get(name, {}),
        )
        for name, schema in found
        for columns in [[column.name for column in schema.columns]]
    ]
    if not items:
        return tag("p", "There are no tables so far.", class_="note")
    return tag("details", tag("summary", f"Tables and columns ({len(items)})"), tag("ul", *items))


def as_page(
    show: Callable[[Content], bytes],
    parts: Generator[bytes, None, None],
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[bytes]:
    """Yield the page with an answer's first rows."""
    with contextlib.closing(parts), pa.ipc.open_stream(io.BufferedReader(_Parts(parts))) as reader:
        heads = reader.schema.names
        rows = (row for batch in _some_rows(reader) for row in rows_of_texts(batch))
        body, size = list[Html](), 0
        for row in islice(rows, ROWS_SHOWN):
            body.append(tag("tr", *map(_cell, row)))
            size += len(body[-1])
            if size > _PAGE_MAX:
                break
        has_more = next(rows, None) is not None
    count = counted(len(body), "row")
    words = f"The first {count}; there are more." if has_more else f"{count}."
    token = headers.get(POSITION_HEADER)
    note = tag("p", words, *([] if token is None else [" As of ", tag("code", token)]), class_="note")
    scroll = grid(heads, body, tabindex=0, role="region", aria_label="Rows")
    yield show(tag("section", tag("h2", "Answer"), note, scroll, id="answer"))


def as_csv(parts: Generator[bytes, None, None]) -> Iterator[bytes]:
    """Yield an answer as CSV, while it comes."""
    with contextlib.closing(parts), pa.ipc.open_stream(io.BufferedReader(_Parts(parts))) as reader:
        yield (",".join(map(csv_field, reader.schema.names)) + "\r\n").encode()
        for batch in _some_rows(reader):
            yield "".join(",".join(map(csv_field, row)) + "\r\n" for row in rows_of_texts(batch)).encode()


def _some_rows(reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    """Yield the rows a few at a time."""
    for batch in reader:
        step = max(1, min(_ROWS_AT_ONCE, batch.num_rows * _BYTES_AT_ONCE // max(1, batch.nbytes)))
        for at in range(0, batch.num_rows, step):
            yield batch.slice(at, step)


def _cell(text: str | None) -> Html:
    if text is None:
        return tag("td", "NULL", class_="null")
    if len(text) > _VALUE_MAX:
        text = f"{text[:_VALUE_MAX]}… ({len(text):,} characters, {human_bytes(len(text.encode()))})"
    return tag("td", text)


class _Parts(io.RawIOBase):
    """A file of bytes that come in parts."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts = parts
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override] # as io calls it
        while not self._left:
            part = next(self._parts, None)
            if part is None:
                return 0
            self._left = memoryview(part)
        size = min(len(buffer), len(self._left))
        buffer[:size] = self._left[:size]
        self._left = self._left[size:]
        return size

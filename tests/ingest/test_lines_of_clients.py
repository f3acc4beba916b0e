r"""InfluxDB's own clients write values that come back unchanged: their serialisers, with odd values.

In tags, keys and measurements alike, the clients themselves change two things. A newline, a tab or a carriage
return becomes a backslash and a letter. A backslash at the end of a tag's value gets a space behind it, which
the client escapes. Values of a frame's tags are escaped as if they were strings.
"""

from __future__ import annotations

import datetime as dt
import struct
from decimal import Decimal
from typing import Any

import influxdb_client
import influxdb_client_3
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from influxdb_client.client.write.dataframe_serializer import data_frame_to_list_of_points
from influxdb_client.client.write_api import PointSettings
from tests.codec.line_samples import same
from tests.seeds import examples

from millstream.ingest.line_protocol import column_fault
from millstream.model.names import parse_qualified_name

POINTS = (influxdb_client.Point, influxdb_client_3.Point)
_LOST = "\n\t\r"
_TEXTS = st.text(
    st.sampled_from("aB \\\",=#é😀'0\x7f\x01") | st.characters(exclude_characters=_LOST, exclude_categories=["Cs"]),
    min_size=1,
    max_size=12,
)
_TAGS = _TEXTS.filter(lambda text: not text.endswith("\\"))
_MEASUREMENTS = _TAGS.filter(lambda text: not text.startswith("#") and "\0" not in text)
_VALUES = (
    st.floats(allow_nan=False, allow_infinity=False)
    | st.integers(-(2**63), 2**63 - 1)
    | st.booleans()
    | st.text(st.sampled_from('a\\",= \n\r\t\0é😀') | st.characters(exclude_categories=["Cs"]), max_size=15)
    | st.decimals(-(10**20), 10**20, allow_nan=False, allow_infinity=False)
)


@st.composite
def _keys(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """Draw keys of tags and of fields that differ by more than case."""
    found = draw(
        st.lists(
            _TAGS.filter(lambda key: column_fault(key) is None),
            min_size=1,
            max_size=7,
            unique_by=lambda key: key.lower(),
        )
    )
    cut = draw(st.integers(0, len(found) - 1))
    return found[:cut], found[cut:]


def _as_read(value: Any) -> Any:
    """Return a value as a column has it: a decimal is written as a float."""
    return float(value) if isinstance(value, Decimal) else value


def _spelled(value: Any) -> tuple[type, Any]:
    return type(value), struct.pack("<d", value) if isinstance(value, float) else value


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from(POINTS), _MEASUREMENTS, _keys(), st.data(), st.integers(-(2**63), 2**63 - 1))
def test_points_come_back(
    point_type: Any, measurement: str, keys: tuple[list[str], list[str]], data: st.DataObject, time_ns: int
):
    tags = {key: data.draw(_TAGS) for key in keys[0]}
    fields = {key: data.draw(_VALUES) for key in keys[1]}
    point = point_type(measurement)
    for key, tag in tags.items():
        point.tag(key, tag)
    for key, value in fields.items():
        point.field(key, value)
    line = point.time(time_ns).to_line_protocol()
    found = same(line.encode())
    assert found.rejected == []
    (table,) = found.tables
    assert parse_qualified_name(table.table) == ("public", measurement)
    (row,) = table.rows.to_pylist()
    assert row.pop("time_ns", time_ns) == time_ns
    assert table.rows.column("time").cast("int64").to_pylist() == [time_ns // 1000]
    del row["time"]
    assert {key: _spelled(value) for key, value in row.items()} == {
        key: _spelled(_as_read(value)) for key, value in (tags | fields).items()
    }


@pytest.mark.parametrize("point_type", POINTS)
def test_unsigned_fields_and_numbers_of_numpy(point_type: Any):
    point = point_type("m").field("f32", np.float32(0.1)).field("i64", np.int64(-5)).field("u", 2**64 - 1)
    point._field_types["u"] = "u"
    (table,) = same(point.to_line_protocol().encode()).tables
    (row,) = table.rows.drop_columns("time").to_pylist()
    assert row == {"f32": float(str(np.float32(0.1))), "i64": -5, "u": Decimal(2**64 - 1)}


@pytest.mark.parametrize("point_type", POINTS)
def test_what_the_clients_writing_loses_is_taken_as_written(point_type: Any):
    point = point_type("m\n").tag("t\t", "a\r").tag("u", "a\\").field("f\n", "a\nb\\")
    (table,) = same(point.to_line_protocol().encode()).tables
    assert table.table == 'public."m\\n"'
    assert table.rows.drop_columns("time").to_pylist() == [{"t\\t": "a\\r", "u": "a ", "f\\n": "a\nb\\"}]


@pytest.mark.parametrize(("precision", "unit_us"), [("us", 1), ("ms", 1000), ("s", 1_000_000)])
def test_times_come_back_in_the_precision_that_they_are_written_in(precision: str, unit_us: int):
    moment = dt.datetime(1969, 12, 31, 23, 59, 58, 999_999, tzinfo=dt.UTC)
    point = influxdb_client.Point("m").field("f", 1).time(moment, precision)
    (table,) = same(point.to_line_protocol().encode(), precision).tables
    (found,) = table.rows.column("time").cast("int64").to_pylist()
    assert abs(found - -1_000_001) < unit_us


def test_frames_come_back():
    frame = pd.DataFrame(
        {
            "host": ["a", "é", "b", None, ""],
            "value": [1.5, float("nan"), -0.0, 1e300, 5e-324],
            "count": pd.array([1, None, -(2**63), 4, 2**63 - 1], dtype="Int64"),
            "ok": [True, False, True, False, True],
            "note": ['say "hi"', "back\\slash", "two\nlines", None, ""],
            "odd name, isn't=it": [1, 2, 3, 4, 5],
        },
        index=pd.to_datetime([1, 1000, 2_000_000, -1, 1_700_000_000_123_456_789], unit="ns", utc=True),
    )
    written = data_frame_to_list_of_points(
        frame, PointSettings(), data_frame_measurement_name="my frame", data_frame_tag_columns=["host"]
    )
    found = same("\n".join(written).encode())
    assert found.rejected == []
    (table,) = found.tables
    assert table.table == 'public."my frame"'
    columns = table.rows.to_pydict()
    assert columns["time_ns"] == [1, 1000, 2_000_000, -1, 1_700_000_000_123_456_789]
    assert columns["host"] == ["a", "é", "b", None, None]
    assert [repr(value) for value in columns["value"]] == ["1.5", "None", "-0.0", "1e+300", "5e-324"]
    assert columns["count"] == [1, None, -(2**63), 4, 2**63 - 1]
    assert columns["ok"] == [True, False, True, False, True]
    assert columns["note"] == ['say "hi"', "back\\slash", "two\nlines", None, ""]
    assert columns["odd name, isn't=it"] == [1, 2, 3, 4, 5]

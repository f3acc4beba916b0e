"""The data source on a cluster: the driver plans from the home's folder, and tasks that can't see it read by Flight."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.serving.test_flight import KEYED, batch, descriptor, put, running

import millstream
from millstream.errors import AccessError, EngineError, OffsetExpired, UsageError
from millstream.home.home import Home
from millstream.model.access import Rights
from millstream.serving.access import Access
from millstream.spark.log_source import LogPartition, MillstreamReader, MillstreamSource, SourceOptions, _Scan
from millstream.testing.errors import coded


def read_elsewhere(home: Path, **options: str) -> list[dict[str, Any]]:
    """Read as tasks on other machines do: in another process's copy of the reader, and without the log's folder."""
    given = {"path": str(home), "stream": "shop", **options}
    source = MillstreamSource(given)
    parts = source.reader(source.schema()).partitions()
    hidden = replace(SourceOptions.parse(given), wal=Path("/nowhere/shop"))
    rows = []
    for part in parts:
        assert isinstance(part, LogPartition)
        span = replace(part.span, path=f"/nowhere/{'/'.join(part.span.path.rsplit('/', 3)[1:])}")
        reader = MillstreamReader(_Scan(hidden, source.schema()))
        sent, task = pickle.loads(pickle.dumps((reader, replace(part, span=span))))
        for found in sent.read(task):
            assert isinstance(found, pa.RecordBatch)
            rows += found.to_pylist()
    return rows


def test_tasks_that_can_not_see_the_log_read_it_by_flight(tmp_path: Path) -> None:
    with running(tmp_path / "home") as (home, server):
        for number in range(5):
            put(server, descriptor(stream="shop", table="public.orders"), batch(number))
        put(server, descriptor(stream="shop", table="public.other"), batch(9))
        flight = {"flight": f"grpc://{server.address}", "partition_bytes": "1"}
        with pytest.raises(EngineError, match="can't read /nowhere/shop", check=coded("log_unreachable")):
            read_elsewhere(home.path, table="public.orders")
        assert [row["id"] for row in read_elsewhere(home.path, table="public.orders", **flight)] == [0, 1, 2, 3, 4]
        names = [row["table"] for row in read_elsewhere(home.path, columns="table,row", **flight)]
        assert names == 5 * ["public.orders"] + ["public.other"]


def test_a_token_reads_its_own_stream_alone(tmp_path: Path) -> None:
    text = KEYED + "[http]\ntokens_required = true\n"
    home = Home(tmp_path / "home")
    home.path.mkdir()
    home.config_file.write_text(text)
    home.prepare()
    with home.open_catalog() as catalog:
        _, own = catalog.create_access_token(Rights.parse(["shop=read"]))
        _, of_another = catalog.create_access_token(Rights.parse(["web=read"]))
    with millstream.open(home.path) as opened:
        opened.append("shop", "orders", [{"id": 1}])
    with running(home.path, text, Access.of_home(home)) as (_, server):
        flight = {"table": "public.orders", "flight": f"grpc://{server.address}"}
        assert [row["id"] for row in read_elsewhere(home.path, **flight, token=own)] == [1]
        with pytest.raises(AccessError, check=coded("forbidden")):
            read_elsewhere(home.path, **flight, token=of_another)
        with pytest.raises(EngineError, check=coded("log_unreachable")):
            read_elsewhere(home.path, **flight)
        given = {"path": str(home.path), "stream": "shop", **flight, "token": own}
        assert own not in repr(SourceOptions.parse(given))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"flight": "127.0.0.1:8788"}, "isn't an address"),
        ({"flight": "grpc://s3cret@host:8788"}, "isn't an address"),
        ({"flight": "grpc://host"}, "isn't an address"),
        ({"token": "s3cret"}, "goes with flight only"),
        ({"flight": "grpc+tls://host:1", "verify": "/nowhere.pem"}, r"nowhere\.pem can't be read"),
        ({"flight": "grpc+tls://host:1", "merged": "true", "table": "orders"}, "take no option 'flight'"),
    ],
)
def test_options_of_flight_that_make_no_sense_are_refused(tmp_path: Path, options: dict[str, str], said: str) -> None:
    with running(tmp_path / "home") as (home, server):
        put(server, descriptor(stream="shop", table="public.orders"), batch(1))
        with pytest.raises(UsageError, match=said) as caught:
            SourceOptions.parse({"path": str(home.path), "stream": "shop", **options})
        assert "s3cret" not in str(caught.value)


def test_a_segment_that_retention_dropped_before_its_task_is_told(tmp_path: Path) -> None:
    with running(tmp_path / "home") as (home, server):
        put(server, descriptor(stream="shop", table="public.orders"), batch(1))
        source = MillstreamSource({"path": str(home.path), "table": "orders"})
        reader = source.reader(source.schema())
        (part,) = reader.partitions()
        assert isinstance(part, LogPartition)
        dropped = replace(part, span=replace(part.span, path=part.span.path.replace("/00000/", "/00009/")))
        with pytest.raises(OffsetExpired, match="retention dropped"):
            list(reader.read(dropped))

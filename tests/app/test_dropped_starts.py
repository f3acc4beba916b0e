"""Every option that names a start or an end refuses a position that retention dropped; none silently begins later."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import StructType
from tests.app.homes import run
from tests.export.test_log_export import fill, home_at

import millstream
from millstream.errors import OffsetExpired, UnknownTable
from millstream.home.home import Home
from millstream.model.ids import ShardId
from millstream.model.positions import Offset, StreamToken
from millstream.protocol.retention import Retention, RetentionBounds
from millstream.spark.log_source import MillstreamReader, SourceOptions, _Scan
from millstream.wal.reader import StreamReader
from millstream.wal.records_json import Cat
from millstream.wal.segment_deletion import drop_segments


@pytest.fixture(scope="module")
def dropped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Home, list[dict[str, Any]]]:
    """A home of two shards whose oldest segments retention dropped, and the records that are left."""
    home = home_at(tmp_path_factory.mktemp("dropped"))
    fill(home)
    folder = str(home.wal_folder("shop"))
    whole = list(Cat("shop", StreamReader(folder)).lines())
    bounds = RetentionBounds(age_s=1e9, size_bytes=(size := _size(folder)) - 100_000, bytes_max=size)
    assert drop_segments(folder, Retention(), bounds).dropped
    first = StreamReader(folder).first_seq()
    assert 1 < first < whole[-1]["seq"]
    return home, [line for line in whole if line["seq"] >= first]


def _size(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*.wal"))


def edge(home: Home) -> tuple[StreamReader, int, str]:
    """Return the log, its first number, and the prefix of its tokens."""
    reader = StreamReader(str(home.wal_folder("shop")))
    return reader, int(reader.first_seq()), str(reader.token()).partition(".s")[0]


@pytest.mark.siege
def test_an_export_from_a_dropped_number_or_token_is_refused(dropped: tuple[Home, list[dict[str, Any]]]) -> None:
    home, left = dropped
    _, first, prefix = edge(home)
    for words in (
        ("--since", f"{prefix}.s{first - 2}"),
        ("--since", f"{prefix}.s0"),
        ("--since", str(first - 1)),
        ("--since", "1"),
        ("--until", f"{prefix}.s1"),
        ("--until", str(first - 2)),
        ("--since", "1", "--format", "arrow", "--table", "orders"),
    ):
        done = run(home.path, "wal", "export", *words)
        assert (done.returncode, done.stdout) == (1, ""), words
        assert "error[offset_expired]" in done.stderr
    for words in (("--since", f"{prefix}.s{first - 1}"), ("--since", str(first)), ()):
        done = run(home.path, "wal", "export", *words)
        assert done.returncode == 0, done.stderr
        assert [json.loads(line)["seq"] for line in done.stdout.splitlines()] == [line["seq"] for line in left]
        assert "dropped" not in done.stderr


@pytest.mark.long
def test_a_time_begins_where_the_log_begins_and_says_so(dropped: tuple[Home, list[dict[str, Any]]]) -> None:
    home, left = dropped
    _, first, _ = edge(home)
    done = run(home.path, "wal", "export", "--since", "2000-01-01")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(left)
    assert f"retention has dropped numbers up to {first - 1}" in done.stderr
    done = run(home.path, "wal", "export", "--until", "2000-01-01")
    assert (done.returncode, done.stdout) == (0, "")
    assert f"retention has dropped numbers up to {first - 1}" in done.stderr
    done = run(home.path, "wal", "export", "--since", "2100-01-01")
    assert "dropped" not in done.stderr


@pytest.mark.long
def test_a_cat_from_a_dropped_offset_of_any_shard_is_refused(dropped: tuple[Home, list[dict[str, Any]]]) -> None:
    home, _ = dropped
    reader, _, _ = edge(home)
    firsts = {shard: reader.first_offset(shard) for shard in reader.shards}
    assert set(firsts) == {ShardId(0), ShardId(1)}
    assert max(firsts.values()) > 0
    done = run(home.path, "wal", "cat", "--from-offset", str(max(firsts.values()) - 1))
    assert (done.returncode, done.stdout) == (1, "")
    assert "error[offset_expired]" in done.stderr
    assert list(Cat("shop", reader, from_offset=Offset(max(firsts.values()))).lines())
    assert list(Cat("shop", reader).lines())


def test_inspect_says_what_is_not_there_any_more(dropped: tuple[Home, list[dict[str, Any]]]) -> None:
    home, _ = dropped
    _, first, _ = edge(home)
    done = run(home.path, "wal", "inspect", "--seq", f"1-{first}")
    assert done.returncode == 0
    assert f"dropped numbers up to {first - 1}" in done.stderr


def test_reading_up_to_a_dropped_token_is_refused(dropped: tuple[Home, list[dict[str, Any]]], tmp_path: Path) -> None:
    home, left = dropped
    reader, first, _ = edge(home)
    old, newest = StreamToken.scalar(reader.stream_id, 1), reader.token()
    shutil.copytree(home.path, tmp_path / "home")
    with millstream.open(tmp_path / "home") as opened:
        for bounds in ({"upto": old}, {"after": old}, {"after": old, "upto": newest}):
            with pytest.raises(OffsetExpired) as caught:
                list(opened.read("shop", **bounds))
            assert caught.value.details["first"] == first
            with pytest.raises(OffsetExpired):
                list(opened.read_latest("shop", "public.orders", **bounds))
        assert sum(batch.num_rows for batch in opened.read("shop", upto=newest)) == len(left)


def test_a_spark_batch_up_to_a_dropped_token_is_refused(dropped: tuple[Home, list[dict[str, Any]]]) -> None:
    home, _ = dropped
    _, first, prefix = edge(home)
    for given in ({"ending": f"{prefix}.s1"}, {"starting": f"{prefix}.s1"}):
        options = SourceOptions.parse({"wal": str(home.wal_folder("shop")), **given})
        with pytest.raises(OffsetExpired):
            MillstreamReader(_Scan(options, StructType())).partitions()
    options = SourceOptions.parse({"wal": str(home.wal_folder("shop")), "ending": f"{prefix}.s{first - 1}"})
    assert MillstreamReader(_Scan(options, StructType())).partitions() == []


def test_a_table_whose_records_are_all_dropped_is_read_on_from_a_token_and_not_from_the_start(tmp_path: Path) -> None:
    """A copy that was resumed by its token got `unknown_table` once the table had been quiet for as long as retention."""
    (tmp_path / "millstream.toml").write_text(
        '[streams.shop.log]\nsegment_bytes = "1MiB"\ndisk_used_max = 1.0\n[streams.shop.keys]\n"public.quiet" = ["id"]\n"public.busy" = ["id"]\n'
    )
    folder = str(tmp_path / "data" / "wal" / "shop")
    with millstream.open(tmp_path) as opened:
        token = opened.append("shop", "quiet", [{"id": 1}]).token
        for number in range(3):
            opened.append("shop", "busy", [{"id": number, "text": random.Random(number).randbytes(600_000).hex()}])
        assert [found.rows.num_rows for found in opened.read_latest("shop", "quiet", after=None)] == [1]
    bounds = RetentionBounds(age_s=1e9, size_bytes=0, bytes_max=1 << 40)
    assert drop_segments(folder, Retention(), bounds).dropped
    with millstream.open(tmp_path) as opened:
        upto = opened.token("shop")
        for read in (opened.read_latest, opened.read):
            for name in ("quiet", "public.quiet"):
                assert list(read("shop", table=name, after=upto)) == []
                with pytest.raises(OffsetExpired, match=r"begins at number \d+, and has no records of") as caught:
                    list(read("shop", table=name))
                assert str(upto) in str(caught.value.hint)
                with pytest.raises(OffsetExpired):
                    list(read("shop", table=name, after=token))
            with pytest.raises(UnknownTable):
                list(read("shop", table="nothing", after=upto))
        opened.append("shop", "quiet", [{"id": 2}])
        assert [found.rows.num_rows for found in opened.read_latest("shop", "quiet", after=upto)] == [1]

"""Two homes that write one stream's tables as regions, and see the same merged rows."""

from __future__ import annotations

import json
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from tests.regions.two_homes import CONFIG, both, follow, made
from tests.wal.plain_operations import plain_ops, plain_table

import millstream
from millstream.administration.doctor import examine
from millstream.app.open_home import open_other
from millstream.cli.main import cli
from millstream.config.file import load_config
from millstream.crdt import HLC
from millstream.errors import (
    ConfigError,
    HomeBusy,
    LogError,
    MergeStateUnreadable,
    MillstreamError,
    ReplicationError,
    UnknownTable,
    UsageError,
)
from millstream.home.home import Home
from millstream.model.ids import RegionId, parse_region_log_name, region_log_name
from millstream.private_files import UNFINISHED
from millstream.processes.role_locks import RoleLock
from millstream.protocol.retention import Retention, RetentionBounds
from millstream.regions import region_clocks
from millstream.regions.merged_table import RegionTable
from millstream.regions.reconcile import reconcile_stream
from millstream.regions.region_clocks import RegionClocks, RegionsHeard, RegionTimes, newest_time
from millstream.testing.errors import coded
from millstream.wal.files import SystemClock
from millstream.wal.reader import StreamReader
from millstream.wal.segment_deletion import drop_segments
from millstream.writers.stream_writer import stream_writer


def doctor(home: Path) -> tuple[str, str]:
    """Return what `doctor` reports about the stream's regions."""
    (found,) = (one for one in examine(Home(home), lambda _: None) if one.check == "regions of shop")
    return found.code, found.message


def rows_of(home: Path, **of: Any) -> dict[int, dict[str, Any]]:
    with millstream.open(home) as opened:
        return {row["id"]: row for row in opened.merged("shop", "posts", **of).to_pylist()}


def run(home: Path, *words: str) -> Any:
    found = CliRunner().invoke(cli, ["--home", str(home), "reconcile", *words], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout) if "--json" in words else found.output


def test_homes_of_two_regions_see_the_same_and_counters_count_both(tmp_path: Path) -> None:
    with both(tmp_path) as (one, two):
        here, there = rows_of(one), rows_of(two)
        assert here == there
        assert here[1]["likes"] == 3
        assert (here[1]["title"], here[1]["tags"], here[1]["hidden"], here[1]["more"]) == (
            "of two",
            ["a", "b", "c"],
            True,
            "x",
        )
        assert here[1]["heat"] == pytest.approx(4.0 + 2.0 + 1.0, rel=1e-3)
        assert (here[1]["heat__1h"], here[1]["heat__7d"], here[2]["heat"], here[2]["heat__24h"]) == (3, 3, None, 0)
        assert (here[2]["title"], here[3]["title"]) == ("here alone", "there alone")
        later = rows_of(one, at=datetime.now(UTC).replace(year=2100))
        assert (later[1]["heat"], later[1]["heat__7d"]) == (0.0, 0)
        with millstream.open(one) as home:
            assert home.streams() == ["shop"]
            assert sum(batch.num_rows for batch in home.read("shop@2", table="posts")) == 2


def test_what_was_reconciled_is_kept_and_only_what_is_new_is_read_again(tmp_path: Path) -> None:
    with both(tmp_path) as (one, two):
        dry = run(one, "--dry-run")
        assert "public.posts, compared with region 2" in dry
        (line,) = [line for line in dry.splitlines() if line.startswith("id=1") and "likes" in line]
        assert line.split()[1:] == ["likes", "5", "-2", "3", "both"]
        assert not (one / "data" / "regions").exists()
        first = run(one, "--json")
        (table,) = first["tables"]
        assert [(taken["region"], taken["own"], taken["rows"]) for taken in table["taken"]] == [
            (1, True, 2),
            (2, False, 2),
        ]
        assert table["rows"] == 3
        assert "nothing new" in run(one)
        before = rows_of(one)
        with millstream.open(two) as home:
            home.append("shop", "posts", [{"id": 3, "likes": 8, "title": "again", "hidden": False}])
        follow(one, two, 2)
        assert rows_of(one)[3]["likes"] == 8
        assert rows_of(one)[1] | {"heat": 0} == before[1] | {"heat": 0}  # which has decayed since
        (table,) = run(one, "--json")["tables"]
        assert [(taken["region"], taken["rows"]) for taken in table["taken"]] == [(1, 0), (2, 1)]
        assert rows_of(one) == rows_of(two)
        with RoleLock.take(Home(one).run_folder, "reconcile"), pytest.raises(HomeBusy):
            # If two ran at once, the last to end would overwrite the other's state with the one it began with.
            reconcile_stream(Home(one), "shop", patience_s=0)
        # Without the kept state the result is the same.
        shutil.rmtree(one / "data" / "regions")
        assert rows_of(one) == rows_of(two)


def test_records_that_come_amid_a_read_are_read_the_next_time(tmp_path: Path) -> None:
    """A table knows the schemas that the logs had when it was opened; those of later records may be others."""
    one, two = made(tmp_path / "one", 1), made(tmp_path / "two", 2)
    with millstream.open(one) as opened:
        opened.append("shop", "posts", {"id": 1, "likes": 5})
    with millstream.open(two) as opened:
        opened.append("shop", "others", {"id": 1})
    follow(one, two, 2)
    table = RegionTable(Home(one), "shop", "posts")
    with millstream.open(two) as opened:
        opened.append("shop", "posts", {"id": 1, "likes": 3})
    follow(one, two, 2)
    state = table.merged_state()
    assert table.engine.value(state).column("likes").to_pylist() == [5]
    assert int(state.vector[RegionId(2)].linear()) == 1
    news = RegionTable(Home(one), "shop", "posts").state_after(state.vector, state.ends)
    assert news is not None
    assert news.rows.num_rows == 1
    assert rows_of(one)[1]["likes"] == 8


def test_a_column_that_merges_comes_with_the_first_row_that_has_it(tmp_path: Path) -> None:
    one, two = made(tmp_path / "one", 1), made(tmp_path / "two", 2)
    with millstream.open(one) as home:
        home.append("shop", "posts", {"id": 7, "likes": 5})
        assert home.merged("shop", "posts").to_pylist() == [{"id": 7, "likes": 5}]
    told = CliRunner().invoke(cli, ["--home", str(one), "reconcile", "--json"])
    assert told.exit_code == 0, told.output
    assert "hidden" in json.loads(told.stdout)["tables"][0]["unwritten"]
    with millstream.open(two) as home:
        home.append("shop", "posts", {"id": 7, "likes": 3, "hidden": True})
    follow(one, two, 2)
    with millstream.open(one) as home:
        assert home.merged("shop", "posts").to_pylist() == [{"id": 7, "likes": 8, "hidden": True}]


def test_what_is_kept_is_damaged_or_of_another_log(tmp_path: Path) -> None:
    with both(tmp_path) as (one, two):
        run(one)
        (kept,) = (one / "data" / "regions" / "shop").iterdir()
        data = kept.read_bytes()
        kept.write_bytes(data[:99] + b"?" + data[100:])
        with pytest.raises(MergeStateUnreadable):
            rows_of(one)
        kept.write_bytes(data)
        shutil.rmtree(two / "data")
        with millstream.open(two) as home:
            home.append("shop", "posts", [{"id": 9, "likes": 1}])
        follow(one, two, 2)
        with pytest.raises(
            ReplicationError, check=coded("other_stream"), match="log of region 2 was made again"
        ) as caught:
            rows_of(one)
        assert "millstream reconcile public.posts" in caught.value.hint
        (done,) = reconcile_stream(Home(one), "shop", ["posts"]).tables
        assert [taken.is_anew for taken in done.taken] == [False, True]
        assert {key: row["likes"] for key, row in rows_of(one).items()} == {1: 5, 2: 1, 9: 1}


def test_a_log_that_is_not_the_regions_it_stands_for_is_refused(tmp_path: Path) -> None:
    with both(tmp_path) as (one, two):
        follow(one, two, 3)
        with pytest.raises(
            ReplicationError, check=coded("other_region"), match="stands for region 3 is that of region 2"
        ):
            rows_of(one)
        shutil.rmtree(one / "data" / "wal" / "shop@3")
        follow(one, two, 1)
        with pytest.raises(
            ReplicationError, check=coded("other_region"), match="named for region 1, which is this home's own"
        ):
            rows_of(one)
        shutil.rmtree(one / "data" / "wal" / "shop@1")
        follow(one, two, 2)
        assert doctor(one) == ("ok", "this is region 1, has the log of region 2, 1 table can merge")
        (one / "millstream.toml").write_text(CONFIG.format(region=4))
        with pytest.raises(ReplicationError, check=coded("other_region")), millstream.open(one) as home:
            home.append("shop", "posts", [{"id": 9}])
        assert doctor(one) == ("other_region", "the log that stands for region 4 is that of region 1")


def test_a_writer_is_later_than_what_it_follows_whatever_its_clock(tmp_path: Path) -> None:
    with both(tmp_path) as (one, two):
        followed = newest_time(StreamReader(str(one / "data" / "wal" / "shop@2")), RegionId(2))
        assert followed is not None
        with millstream.open(one) as home:
            home.append("shop", "posts", [{"id": 1, "title": "last"}])
        own = newest_time(StreamReader(str(one / "data" / "wal" / "shop")), RegionId(1))
        assert own is not None
        assert own > followed
        follow(two, one, 1)
        assert rows_of(two)[1]["title"] == "last"


class Hearing:
    """A log's writer that notes the times that it hears."""

    def __init__(self) -> None:
        self.times: list[HLC] = []

    def hear(self, time: HLC, *, name: str) -> None:
        assert name == "region 2"
        self.times.append(time)

    def place_in(self, region: int) -> object:
        return None if region == 2 else region

    def hear_writes(self, region: int, writes: list[object], place: object, *, is_anew: bool, is_cut: bool) -> None:
        assert (region, writes, is_anew, is_cut, place is not None) == (2, [], True, False, True)


def test_a_followed_log_is_heard_when_it_has_more_also_after_it_was_cut_or_made_anew(tmp_path: Path) -> None:
    with both(tmp_path) as (one, two):
        clocks = RegionClocks(Home(one), "shop", Home(one).config.streams["shop"])
        log: Any = Hearing()
        shorter = tmp_path / "shorter"
        shutil.copytree(two / "data" / "wal" / "shop", shorter)
        for _ in range(2):
            clocks.hear(log)
        assert len(log.times) == 1, "it has no more"
        with millstream.open(two) as home:
            home.append("shop", "posts", [{"id": 3, "likes": 8}])
        follow(one, two, 2)
        clocks.hear(log)
        assert log.times[1] > log.times[0]
        copy = one / "data" / "wal" / "shop@2"
        shutil.rmtree(copy)
        shutil.copytree(shorter, copy)
        clocks.hear(log)
        assert log.times[2] == log.times[0]
        follow(one, two, 2)
        clocks.hear(log)
        assert log.times[3] == log.times[1]


def test_tables_that_can_not_merge_are_refused_by_name(tmp_path: Path) -> None:
    with both(tmp_path) as (one, two):
        with millstream.open(one) as home:
            home.append("shop", "notes", [{"id": 1, "text": "x"}])
            home.append("shop", "loose", [{"n": 1}])
            assert home.merged("shop", "notes").to_pylist() == [{"id": 1, "text": "x"}]
            with pytest.raises(ReplicationError, check=coded("merge_unsuitable"), match="loose has no key"):
                home.merged("shop", "loose")
            with pytest.raises(UnknownTable):
                home.merged("shop", "nothing")
        with millstream.open(two) as home:
            home.append("shop", "notes", [{"id": "text", "text": "x"}])
        follow(one, two, 2)
        with pytest.raises(ReplicationError, check=coded("merge_unsuitable"), match=r"notes\.id is .* in one region"):
            RegionTable(Home(one), "shop", "notes")
        (one / "millstream.toml").write_text(
            CONFIG.format(region=1).replace('likes = "pn_counter"', 'title = "pn_counter"')
        )
        with (
            pytest.raises(ReplicationError, check=coded("merge_unsuitable"), match=r"posts\.title is string"),
            millstream.open(one) as home,
        ):
            home.append("shop", "posts", [{"id": 9}])
        assert doctor(one) == ("merge_unsuitable", "public.posts.title is string, which can't merge by pn_counter")
        (one / "millstream.toml").write_text("[streams.shop]\nregion = 1\n")
        with pytest.raises(UsageError, match="merges no table"):
            run(one)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[streams.shop.merge.posts]\nlikes = "sum"', "no column merges by 'sum'"),
        ('[streams.shop.merge.posts]\nid = "lww"', "is of the key"),
        ('[streams.shop.merge.clicks]\nn = "lww"', "has no key to tell its rows by"),
        ('[streams.shop.merge."a.b.c"]\nn = "lww"', "a.b.c"),
        ('[writer]\nname = "w"', "has one writer in each"),
    ],
)
def test_a_mistake_in_what_merges_is_told_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "millstream.toml"
    file.write_text(f'[streams.shop]\nregion = 2\n[streams.shop.keys]\nposts = ["id"]\n{text}\n')
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")) as caught:
        load_config(file)
    assert "millstream.toml:" in str(caught.value)


def test_names_of_regions_logs_are_checked() -> None:
    assert region_log_name("shop", RegionId(2)) == "shop@2"
    assert parse_region_log_name("shop@2") == ("shop", RegionId(2))
    assert parse_region_log_name("shop") is None
    for name in ("shop@", "shop@02", "shop@x", "shop@2@3", "Shop@1", "shop@4294967296", "@1"):
        with pytest.raises(MillstreamError):
            parse_region_log_name(name)


def test_arrow_types_of_merged_tables_hold_what_merging_makes(tmp_path: Path) -> None:
    with both(tmp_path) as (one, _), millstream.open(one) as home:
        schema = home.merged("shop", "posts").schema
    assert schema.field("likes").type == pa.int64()
    assert schema.field("heat").type == pa.float64()


def test_columns_that_merge_otherwise_lose_nothing_that_retention_has_dropped(tmp_path: Path) -> None:
    small = CONFIG.replace("disk_used_max = 1.0", 'disk_used_max = 1.0\nsegment_bytes = "256 KiB"')
    home = made(tmp_path / "home", 1, small)
    file = home / "millstream.toml"
    with millstream.open(home) as opened:
        opened.append("shop", "posts", [{"id": 1, "likes": 3, "tags": ["a"], "heat": 1.0, "hidden": False}])
        while len(list((home / "data" / "wal" / "shop" / "00000").glob("*.wal"))) < 3:
            opened.append("shop", "other", [{"id": 1, "text": os.urandom(50_000).hex()}])
    done = CliRunner().invoke(cli, ["--home", str(home), "reconcile"])
    assert done.exit_code == 0, done.output
    drop_segments(str(home / "data" / "wal" / "shop"), Retention(), RetentionBounds(0.0, 0, 0))
    assert StreamReader(str(home / "data" / "wal" / "shop")).first_seq() > 1
    # The kept state suffices for these as well: it has their newest value, as for any column.
    file.write_text(small.format(region=1).replace("pn_counter", "lww"))
    with millstream.open(home) as opened:
        assert opened.merged("shop", "posts").to_pylist()[0]["likes"] == 3
        opened.append("shop", "posts", [{"id": 1, "likes": 3, "heat": 2.0}])
        # Events that retention has dropped are in the kept state.
        (row,) = opened.merged("shop", "posts").to_pylist()
        assert (row["heat"], row["heat__7d"]) == (pytest.approx(3.0, rel=1e-2), 2)
    apart = RegionTable(Home(home), "shop", "posts")
    (own,) = apart.states_apart().values()
    assert apart.engine.value(own).column("heat__7d").to_pylist() == [2]
    # For these columns the state has more than the newest value, and it can't be converted.
    for of, instead in (("signal(1d)", "signal(2d)"), ("union_set", "or_set")):
        file.write_text(small.format(region=1).replace(of, instead))
        with (
            millstream.open(home) as opened,
            pytest.raises(ReplicationError, check=coded("merge_unsuitable"), match="retention has dropped"),
        ):
            opened.merged("shop", "posts")
    kept = home / "data" / "regions" / "shop" / "public.posts.state"
    before = kept.read_bytes()
    refused = CliRunner().invoke(cli, ["--home", str(home), "reconcile"])
    assert refused.exit_code != 0
    assert kept.read_bytes() == before
    file.write_text(small.format(region=1))
    with millstream.open(home) as opened:
        assert opened.merged("shop", "posts").to_pylist()[0]["tags"] == ["a"]


@pytest.mark.parametrize("keyed", [False, True])
def test_a_write_wins_over_a_row_that_was_read_just_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, keyed: bool
) -> None:
    real, ahead_ns = SystemClock.now_ns, 0
    monkeypatch.setattr(SystemClock, "now_ns", lambda self: real(self) + ahead_ns)
    with both(tmp_path) as (one, two), millstream.open(one) as home:
        for number in (1, 2):  # the second comes sooner after the first than any pause
            write_id = {"session": "s", "number": number} if keyed else {}
            ahead_ns = number * 20 * 10**9
            with millstream.open(two) as other:
                other.append("shop", "posts", {"id": 1, "title": f"of two {number}"})
            ahead_ns = 0
            follow(one, two, 2)
            assert home.merged("shop", "posts").column("title").to_pylist()[0] == f"of two {number}"
            home.append("shop", "posts", {"id": 1, "title": f"of one {number}"}, **write_id)  # type: ignore[arg-type]
            assert home.merged("shop", "posts").column("title").to_pylist()[0] == f"of one {number}"


def test_a_write_that_no_appender_takes_wins_over_a_row_that_was_read_just_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a captured source or of a write buffer go to the log's writer directly."""
    real, ahead_ns = SystemClock.now_ns, 20 * 10**9
    with both(tmp_path) as (one, two), Home(one).open_catalog() as catalog:
        home, table = Home(one), plain_table(9)
        with stream_writer(home, catalog, "shop", home.config.streams["shop"], open_other) as writer:
            writer.log.append(plain_ops({1: [(table, 1, "x")]}))
            with monkeypatch.context() as patched:
                patched.setattr(SystemClock, "now_ns", lambda self: real(self) + ahead_ns)
                with millstream.open(two) as other:
                    other.append("shop", "posts", {"id": 1, "title": "of two"})
            follow(one, two, 2)
            writer.log.append(plain_ops({2: [(table, 1, "x")]}))
            own = newest_time(StreamReader(str(one / "data" / "wal" / "shop")), RegionId(1))
            followed = newest_time(StreamReader(str(one / "data" / "wal" / "shop@2")), RegionId(2))
            assert own is not None
            assert followed is not None
            assert own > followed


def test_a_log_that_fails_or_is_too_far_ahead_is_not_asked_again_for_each_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches, opened = [0], [0]
    now_s = [1000.0]
    monkeypatch.setattr("millstream.regions.region_clocks.time.monotonic", lambda: now_s[0])

    def refuse(time: HLC, *, name: str) -> None:
        raise ReplicationError(f"{name} is too far ahead: {time}", code="clock_skew")

    def search(*_: object) -> None:
        searches[0] += 1

    def fail(folder: str) -> StreamReader:
        opened[0] += 1
        raise LogError(f"no log in {folder}", code="log_empty")

    monkeypatch.setattr(region_clocks, "newest_time_within", search)
    with both(tmp_path) as (one, _):
        config = Home(one).config.streams["shop"]
        ask = RegionTimes(Home(one), "shop", config, refuse)
        for _ in range(5):
            ask()
        assert searches == [1]
        now_s[0] += 0.21
        for _ in range(5):
            ask()
        assert searches == [2]
        monkeypatch.setattr(region_clocks, "StreamReader", fail)
        ask = RegionTimes(Home(one), "shop", config, refuse)
        for _ in range(5):
            ask()
        assert opened == [1]


def test_a_commit_group_observes_a_log_only_if_it_has_more(tmp_path: Path) -> None:
    times: list[HLC] = []

    def hear(time: HLC, *, name: str) -> None:
        assert name == "region 2"
        times.append(time)

    with both(tmp_path) as (one, two):
        ask = RegionTimes(Home(one), "shop", Home(one).config.streams["shop"], hear)
        shorter = tmp_path / "shorter"
        shutil.copytree(two / "data" / "wal" / "shop", shorter)
        for _ in range(3):
            ask()
        assert len(times) == 1
        newest = newest_time(StreamReader(str(shorter)), RegionId(2))
        assert times == [newest]
        with millstream.open(two) as home:
            home.append("shop", "posts", [{"id": 3, "likes": 8}])
        follow(one, two, 2)
        ask()
        assert times[1] > times[0]
        copy = one / "data" / "wal" / "shop@2"
        shutil.rmtree(copy)
        shutil.copytree(shorter, copy)
        ask()
        assert times[2] == times[0]
        follow(one, two, 2)
        ask()
        assert times[3] == times[1]


def test_a_log_counts_as_observed_only_if_its_newest_group_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[HLC] = []
    with both(tmp_path) as (one, _):
        newest = newest_time(StreamReader(str(one / "data" / "wal" / "shop@2")), RegionId(2))
        monkeypatch.setattr(StreamReader, "newest_headers", lambda *_: [])  # as if its segment had just gone
        config = Home(one).config.streams["shop"]
        RegionTimes(Home(one), "shop", config, lambda time, name: times.append(time))()  # noqa: ARG005
        assert times == [newest]


def test_writes_that_may_repeat_another_regions_look_for_them_now_and_then_and_never_wait() -> None:
    looks: list[int] = []

    def hear() -> None:
        looks.append(1)
        heard()  # as another thread would, amid the look
        raise LogError("no log", code="log_empty")

    heard = RegionsHeard(hear)
    for _ in range(5):
        heard()
    assert len(looks) == 1


def test_what_a_killed_process_left_of_a_state_goes_with_the_next_one(tmp_path: Path) -> None:
    """A process that memory runs out for may be killed again and again: each left a file as large as the table."""
    with both(tmp_path) as (one, _):
        folder = one / "data" / "regions" / "shop"
        folder.mkdir(parents=True)
        (folder / f"{UNFINISHED}0123456789abcdef").write_bytes(b"x" * 1000)
        reconcile_stream(Home(one), "shop", ["posts"])
        assert [file.name for file in folder.iterdir()] == ["public.posts.state"]

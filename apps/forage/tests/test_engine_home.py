"""The engine on a home on disk: who may open it, and what survives a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import millstream
from millstream.errors import CorruptWal, HomeBusy
from millstream_forage.answers import as_json
from millstream_forage.corpus import default_corpus
from millstream_forage.engine import ForageEngine
from millstream_forage.homes import HomeUnusable, NotForagesHome
from millstream_forage.tables import ID_MAX, REGION_MAX, STREAM, home_config, region_of

NOW_NS = 1_700_000_000_000_000_000


def now() -> int:
    return NOW_NS


def test_a_home_has_one_engine_and_its_successor_continues(tmp_path: Path):
    home = tmp_path / "home"
    with ForageEngine.open(home, clock=now) as engine:
        assert engine.seed_default_corpus() == 100
        feed = engine.feed(1)
        blocked = feed.items[0].creator
        engine.block(1, blocked)
        engine.signal(1, feed.items[1].item_id, "save", impression_id=feed.items[1].impression_id, idempotency_key="k")
        last = engine.feed(1)
        preview = engine.feed(1, 50, 8, preview=True)
        with pytest.raises(HomeBusy):
            ForageEngine.open(home)
    with ForageEngine.open(home, clock=now) as engine:
        assert engine.seed_default_corpus() == 0
        assert as_json(engine.feed(1, 50, 8, preview=True)) == as_json(preview)
        assert as_json(engine.feed(1)) == as_json(last)
        assert blocked not in {item.creator for item in preview.items}
        again = engine.signal(
            1, feed.items[1].item_id, "save", impression_id=feed.items[1].impression_id, idempotency_key="k"
        )
        assert again.duplicate
    with millstream.open(home) as opened:
        assert {row["value"] for batch in opened.read(STREAM, table="hides") for row in batch.to_pylist()} == {blocked}


def test_an_ephemeral_home_is_gone_after_it_is_closed():
    engine = ForageEngine.ephemeral(clock=now)
    folder = engine.path
    assert folder.is_dir()
    engine.close()
    engine.close()
    assert not folder.exists()


def test_a_home_of_something_else_is_refused_and_left_as_it_is(tmp_path: Path):
    (tmp_path / "millstream.toml").write_text("[streams.web]\n")
    with pytest.raises(NotForagesHome):
        ForageEngine.open(tmp_path)
    assert (tmp_path / "millstream.toml").read_text() == "[streams.web]\n"


def test_a_folder_that_can_be_no_home_is_refused_with_its_name(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HomeUnusable, match="file"):
        ForageEngine.open(tmp_path / "file")
    with pytest.raises(HomeUnusable, match="inner"):
        ForageEngine.open(tmp_path / "file" / "inner")
    home = tmp_path / "home"
    home.mkdir()
    (home / "millstream.toml").write_text("[streams.forage")
    with pytest.raises(HomeUnusable, match="can't be read"):
        ForageEngine.open(home)


def test_a_home_that_was_killed_while_it_was_made_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Half a configuration names no stream of Forage, so the home would be refused for ever."""

    def killed(_: int) -> None:
        raise RuntimeError

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", killed)
        with pytest.raises(RuntimeError):
            ForageEngine.open(tmp_path)
    assert not (tmp_path / "millstream.toml").exists()
    with ForageEngine.open(tmp_path) as engine:
        assert engine.items().items == []


def test_a_log_whose_beginning_is_gone_serves_nothing(tmp_path: Path):
    """Without its oldest records the engine would show again what a user hid."""
    home = tmp_path / "home"
    with ForageEngine.open(home) as engine:
        engine.seed_default_corpus()
        engine.block(1, "Ada")
    with ForageEngine.open(home) as engine:
        engine.heartbeat()  # in a segment of its own, as each process begins one
    first, *others = sorted(home.glob("data/wal/forage/*/*.wal"))
    assert others
    first.unlink()
    with pytest.raises(CorruptWal):
        ForageEngine.open(home)


@pytest.mark.parametrize(
    ("removed", "lacks"),
    [
        ('retention_age = "36500d"\n', "lacks log.retention_age\\n"),
        ('"public.hides" = ["user", "target", "value"]\n', 'lacks keys."public.hides"\\n'),
        ('hidden = "hide"\n', 'lacks merge."public.hides"\\n'),
    ],
)
def test_a_configuration_under_which_hidden_items_could_show_again_is_refused(removed: str, lacks: str, tmp_path: Path):
    """Written by hand for a second region: the log was dropped after a week, or the regions' hides couldn't merge."""
    config = home_config(2)
    assert removed in config
    (tmp_path / "millstream.toml").write_text(config.replace(removed, ""))
    with pytest.raises(HomeUnusable, match=lacks):
        ForageEngine.open(tmp_path)
    (tmp_path / "millstream.toml").write_text(config.replace("36500d", "400d").replace('"public.', '"'))
    ForageEngine.open(tmp_path).close()


def test_a_homes_region_is_in_its_configuration():
    assert region_of(home_config()) == 0
    assert region_of(home_config(3)) == 3


def test_a_region_whose_ids_json_can_not_keep_is_refused(tmp_path: Path):
    for region, fits in ((REGION_MAX, True), (REGION_MAX + 1, False)):
        home = tmp_path / str(region)
        home.mkdir()
        (home / "millstream.toml").write_text(home_config(region))
        if not fits:
            with pytest.raises(HomeUnusable, match=f"region {region}"):
                ForageEngine.open(home)
            continue
        with ForageEngine.open(home) as engine:
            assert engine.add_item(default_corpus()[0]).item_id <= ID_MAX
            assert len(engine.feed(1).items) == 1


CHILD = """
import sys
from millstream_forage.engine import ForageEngine
engine = ForageEngine.open(sys.argv[1], clock=lambda: 1_700_000_000_000_000_000)
engine.seed_default_corpus()
print("ready", flush=True)
user = 1
while True:
    feed = engine.feed(user, 7)
    for item in feed.items[:2]:
        engine.signal(user, item.item_id, "skip", impression_id=item.impression_id)
        print(user, item.item_id, flush=True)
    user += 1
"""


@pytest.mark.siege
@pytest.mark.parametrize("lines", [1, 6, 17])
def test_a_killed_engine_has_hidden_what_it_acknowledged(lines: int, tmp_path: Path):
    home = tmp_path / "home"
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(home)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        acknowledged = [child.stdout.readline().split() for _ in range(lines)]
        os.kill(child.pid, signal.SIGKILL)
        acknowledged += [line.split() for line in child.stdout.read().splitlines()]
        child.wait()
        with ForageEngine.open(home, clock=now) as engine:
            hidden: dict[int, set[int]] = {}
            for user, item in (map(int, line) for line in acknowledged if len(line) == 2):
                hidden.setdefault(user, set()).add(item)
            for user, items in hidden.items():
                feed = engine.feed(user, 50, 1, preview=True)
                assert not items & {item.item_id for item in feed.items}
                assert len(feed.items) == 50
                assert as_json(engine.feed(user, 50, 1, preview=True)) == as_json(feed)

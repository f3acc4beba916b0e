"""A discovery run adds what the sources hold, once, and records itself."""

import json
from pathlib import Path

from apps.forage.tests.bodies import ENTRY

from millstream_forage.discovery import discover
from millstream_forage.engine import ForageEngine
from millstream_forage.sources import Registry


def test_a_run_adds_new_items_once_and_reports_the_others(tmp_path: Path) -> None:
    (tmp_path / "items.json").write_text(json.dumps([ENTRY, ENTRY | {"url": "https://tides.example/5", "words": 0}]))
    (tmp_path / "sources.toml").write_text('[[sources]]\nname = "Tides"\njson = "items.json"\ncategory = "sea"\n')
    registry = Registry.load(tmp_path / "sources.toml")
    with ForageEngine.ephemeral(clock=lambda: 10**18) as engine:
        assert engine.browse_tasks().should_run
        first, second = discover(engine, registry), discover(engine, registry)
        assert (first.added, first.known, second.added, second.known) == (1, 0, 0, 1)
        assert [refused.entry for refused in first.refused] == ["https://tides.example/5"]
        assert first.next_run > 10**18
        assert not engine.browse_tasks().should_run
        (item,) = engine.items().items
        assert (item.title, item.source, item.reading_time_min) == ("Harbours That Rise", "Tides", 8)

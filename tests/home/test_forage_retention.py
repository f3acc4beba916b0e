"""Forage's log under retention: its home keeps everything, because the log is the only copy of the state."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from millstream.errors import OffsetExpired
from millstream.home.home import Home
from millstream.home.retention import bounds_of
from millstream.protocol.retention import Retention
from millstream.testing.clock import ManualClock
from millstream.wal.segment_deletion import drop_segments
from millstream_forage.clock import DAY_NS
from millstream_forage.engine import ForageEngine
from millstream_forage.tables import STREAM

NOW_NS = 1_700_000_000_000_000_000


def test_retention_keeps_the_log_and_with_it_what_is_hidden(tmp_path: Path) -> None:
    """Segments that are decades old stay. With other settings they are dropped, and then nothing is served."""
    home = tmp_path / "home"
    with ForageEngine.open(home, clock=lambda: NOW_NS) as engine:
        engine.seed_default_corpus()
        shown = engine.feed(1, 50, 1).items
        engine.hide(1, shown[0].item_id)
        engine.block(1, shown[1].creator)
    for _ in range(2):
        with ForageEngine.open(home, clock=lambda: NOW_NS) as engine:
            engine.heartbeat()  # in a segment of its own, as each process begins one
    found = Home.find(home, needs_source=False, named_by="home")
    folder, log = found.wal_folder(STREAM), found.config.streams[STREAM].log
    bounds, later = bounds_of(log, folder), ManualClock(time.time_ns() + 50 * 365 * DAY_NS)
    assert drop_segments(str(folder), Retention(), bounds, clock=later).dropped == ()
    with ForageEngine.open(home, clock=lambda: NOW_NS) as engine:
        for seed in range(8):
            items = engine.feed(1, 50, seed, preview=True).items
            assert shown[0].item_id not in {item.item_id for item in items}
            assert shown[1].creator not in {item.creator for item in items}
    assert drop_segments(str(folder), Retention(), replace(bounds, age_s=1.0), clock=later).dropped
    with pytest.raises(OffsetExpired):
        ForageEngine.open(home)

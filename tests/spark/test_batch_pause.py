"""When the next batch starts: the rules of `trigger_interval`, as arithmetic."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from uuid import UUID

import pytest
from tests.app.homes import make_home

from millstream.home.config_mapping import pipeline_config
from millstream.home.home import Home
from millstream.model.ids import StreamId
from millstream.spark.batch_pause import INTERVAL_S_MIN, PAUSE_S_MAX, pause_s


def starts(took_s: float, interval_s: float | None, *, within_s: float) -> list[float]:
    """Return when batches start, if each takes as long."""
    found = [0.0]
    while found[-1] < within_s:
        found.append(found[-1] + took_s + pause_s(took_s, interval_s))
    return found


@pytest.mark.parametrize(("took_s", "expected"), [(0.0, 0.5), (0.2, 0.5), (2.0, 2.0), (60.0, 60.0)])
def test_a_fixed_interval_is_from_start_to_start_unless_a_batch_takes_longer(took_s: float, expected: float) -> None:
    assert took_s + pause_s(took_s, 0.5) == expected


@pytest.mark.parametrize(
    ("took_s", "expected"), [(0.0, 0.5), (0.2, 0.5), (0.25, 0.5), (1.0, 2.0), (4.0, 8.0), (60.0, 65.0)]
)
def test_an_adaptive_batch_waits_as_long_as_the_last_one_took(took_s: float, expected: float) -> None:
    assert took_s + pause_s(took_s, None) == pytest.approx(expected)
    assert pause_s(took_s, None) <= PAUSE_S_MAX


def test_adaptive_batches_of_many_tables_are_half_as_many_and_quick_ones_as_many_as_ever() -> None:
    many, quick = ([len(starts(took_s, rule, within_s=120.0)) for rule in (0.5, None)] for took_s in (2.0, 0.1))
    assert many == [61, 31]
    assert quick[0] == quick[1]
    assert all(b - a >= INTERVAL_S_MIN - 1e-9 for a, b in pairwise(starts(0.1, None, within_s=10.0)))


@pytest.mark.parametrize(("text", "expected"), [("auto", None), ("2s", 2000), ("0s", 1)])
def test_the_configured_interval_reaches_the_pipeline(tmp_path: Path, text: str, expected: int | None) -> None:
    home = Home(make_home(tmp_path, f'[streams.web]\n[spark]\ntrigger_interval = "{text}"\n'))
    config = pipeline_config(home, "web", home.config.streams["web"], StreamId(UUID(int=1)))
    assert config.trigger_interval_ms == expected

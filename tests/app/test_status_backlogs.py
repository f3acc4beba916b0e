"""A status that is asked for repeatedly keeps its counts of the log, and they stay right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.app.homes import make_home

from millstream.app.open_home import OpenHome
from millstream.app.repeated_status import StatusCache
from millstream.app.status import collect_status
from millstream.home.home import Home
from millstream.wal import segment_scan


def test_kept_counts_are_those_of_a_first_look_and_read_only_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(make_home(tmp_path / "home", "[streams.shop]\n"))
    home.prepare()
    kept = StatusCache()
    read = 0
    frame = segment_scan.read_frame

    def counting(*args: Any, **options: Any) -> Any:
        nonlocal read
        read += 1
        return frame(*args, **options)

    def waits(cache: StatusCache | None) -> tuple[int, int]:
        (stream,) = collect_status(home, cache)["streams"]
        return stream["lag"]["lake"]["records"], stream["lag"]["lake"]["bytes"]

    monkeypatch.setattr(segment_scan, "read_frame", counting)
    with OpenHome(home) as opened:
        for number in range(60):
            opened.append("shop", "public.orders", [{"id": number}])
            if number % 20 == 0:
                assert waits(kept) == waits(None)
                assert waits(kept)[0] == number + 1
        assert waits(kept) == waits(None)
        read = 0
        waits(None)
        assert read >= 60
        read = 0
        waits(kept)
        assert read < 10
    kept.close()

"""`restore --at`: the newest catalog comes with a log that ends earlier, and its position of the source must not count."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.home.home import Home
from millstream.model.positions import Lsn, Seq
from millstream.nodes.restore import _adopt


@pytest.mark.parametrize(
    ("log_had", "is_cut", "log", "reached"),
    [
        (None, True, 100, 100),
        (None, True, 0, 1),
        (None, True, 200, 200),
        (None, False, 100, 200),
        (150, True, 100, 100),
        (150, True, 160, 200),
    ],
)
def test_a_log_that_was_cut_tells_alone_how_far_the_source_was_captured(
    tmp_path: Path, log_had: int | None, is_cut: bool, log: int, reached: int
) -> None:
    """Earlier versions stored the position alone: capture went on there, and the changes between were skipped silently."""
    (tmp_path / "millstream.toml").write_text("[streams.shop]\n")
    home = Home(tmp_path)
    home.prepare()
    with home.open_catalog() as catalog:
        stream = catalog.resolve_stream("shop")
        source = catalog.resolve_source(stream, 7, "shop", 1)
        unread = catalog.resolve_source(stream, 8, "shop", 1)
        of_a_buffer = catalog.resolve_source(stream, 0, "buffer/0", 1)
        catalog.move_reached(source, Lsn(200), log_had=None if log_had is None else Lsn(log_had))
        catalog.move_reached(of_a_buffer, Lsn(9))
    _adopt(home, "shop", stream, {}, Seq(0), is_cut=is_cut)
    with home.open_catalog() as catalog:
        assert catalog.reached_in(source, {source: Lsn(log)} if log else {}) == reached
        assert catalog.reached_in(unread, {}) == 0, "capture never ran"
        assert catalog.reached_in(of_a_buffer, {}) == 9

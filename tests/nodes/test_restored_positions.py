"""`restore --at`: the newest catalog comes with a log that ends earlier, and its position of the source must not count."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.home.home import Home
from millstream.model.ids import StreamId
from millstream.model.positions import Lsn, Seq
from millstream.nodes.restore import _adopt


@pytest.mark.parametrize(("is_cut", "reached"), [(True, 0), (False, 200)])
def test_a_log_that_was_cut_tells_alone_how_far_the_source_was_captured(
    tmp_path: Path, is_cut: bool, reached: int
) -> None:
    """Capture went on at the catalog's position, and the changes between were skipped silently."""
    (tmp_path / "millstream.toml").write_text("[streams.shop]\n")
    home = Home(tmp_path)
    home.prepare()
    with home.open_catalog() as catalog:
        stream: StreamId = catalog.resolve_stream("shop")
        source = catalog.resolve_source(stream, 7, "shop", 1)
        catalog.move_reached(source, Lsn(200))
    _adopt(home, "shop", stream, {}, Seq(0), is_cut=is_cut)
    with home.open_catalog() as catalog:
        assert catalog.reached(source) == reached

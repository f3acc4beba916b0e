"""`diff` with a log that was put back under a newer catalog: what it lacks is no difference of the lake."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from tests.spark.hand_made import Home as HandMade
from tests.spark.hand_made import insert

from millstream.capture.config import CaptureConfig
from millstream.diff.position import PositionWait, wait_for_lake
from millstream.errors import LakeBehind
from millstream.home.home import Home
from millstream.lake.commit_cuts import commit_cut
from millstream.lake.layout import LakeLayout
from millstream.model.positions import Lsn


@pytest.mark.parametrize("log_lacks", [0, 10])
def test_the_position_of_a_newer_catalog_does_not_count(tmp_path: Path, log_lacks: int) -> None:
    """The comparison took the log for complete, and named the rows that it lacked as missing in the lake."""
    (tmp_path / "millstream.toml").write_text("[streams.shop]\n")
    made = HandMade(tmp_path)
    n = made.commit(insert(made.table("orders", id=pa.int32()), id=1))
    logged = Lsn(made.last_lsn + 50)
    made.catalog.move_reached(made.source, Lsn(logged + 100), log_had=Lsn(logged + log_lacks))
    layout = LakeLayout(str(tmp_path / "lake"), "shop", made.stream)
    commit_cut(layout, n, [], committed_at=datetime.now(UTC))
    capture = CaptureConfig("shop", "host=127.0.0.1 port=1", (), "shop", "shop", str(tmp_path / "spill"))
    home = Home(tmp_path)
    waiting = PositionWait(
        home, "shop", capture, made.catalog, layout, made.source, time.monotonic() + 10, lambda _doing: None
    )
    if log_lacks:
        with pytest.raises(LakeBehind, match="changes that the log hasn't"):
            wait_for_lake(waiting, Lsn(logged + 50), before=n)
    else:
        assert wait_for_lake(waiting, Lsn(logged + 50), before=n) == n
    made.close()

"""What the progress line says."""

from __future__ import annotations

from typing import Any

from millstream.cli.progress import describe


def lake(**progress: Any) -> str:
    return describe("pipeline", {"stream": "shop", "progress": progress})


def test_the_line_never_sets_two_counts_of_different_things_side_by_side() -> None:
    """It said "124,838 records durable → lake: 124,848 landed", since the lake counted what an earlier run had left, too."""
    captured = describe("capture", {"stream": "shop", "progress": {"records": 124_838, "source_end": 9, "durable": 9}})
    assert captured == "shop: 124,838 records captured, 0 B behind"
    of_run = {"rows": 124_848, "rows_per_s": 0.0, "lag_s": 0.4}
    assert lake(**of_run, lag_records=0) == "→ lake: has all of it"
    behind = lake(**of_run | {"rows_per_s": 4321.0}, lag_records=1_500)
    assert behind == "→ lake: 1,500 or fewer records behind, 4,321/s, lag 0.4 s"
    assert lake() == "→ lake: nothing landed yet"

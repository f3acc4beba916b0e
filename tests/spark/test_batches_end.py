"""A driver that ends while a table's write is about to be tried again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from millstream.errors import EngineError, LakeUnavailable, MillstreamError, Retry
from millstream.model.ids import TableId
from millstream.model.positions import Seq
from millstream.spark.batches import BatchLander, Landed
from millstream.spark.landing import TableError


class Lander(BatchLander):
    runs = 0
    code = "lake_unavailable"

    def _run(self, after: Seq, upto: Seq, *_: Any, **__: Any) -> Landed:
        Lander.runs += 1
        return Landed(after, upto, {}, {TableId(1): TableError(Lander.code, "full", "", Retry.BACKOFF)}, {}, None)

    def _try_again(self, tables: Any) -> None:
        self._trying = tables


def test_a_driver_that_ends_leaves_a_batch_to_the_next_run_in_place_of_hurried_tries() -> None:
    nothing: Any = SimpleNamespace(tables={}, schemas=dict)
    lander = Lander(*[nothing] * 8, lambda _: None, lambda: None, wait=lambda _: True)
    assert lander._write(Seq(0), Seq(1), frozenset()) is None
    assert Lander.runs == 1


@pytest.mark.parametrize(
    ("code", "kind"),
    [("lake_unavailable", LakeUnavailable), ("lake_forbidden", LakeUnavailable), ("lake_conflict", EngineError)],
)
def test_a_lake_that_takes_nothing_is_an_error_with_its_reason(
    code: str, kind: type[MillstreamError], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing: Any = SimpleNamespace(tables={}, schemas=dict)
    monkeypatch.setattr(Lander, "code", code)
    lander = Lander(*[nothing] * 8, lambda _: None, lambda: None, wait=lambda _: None)
    with pytest.raises(kind, match="no table of the lake can be written: full") as caught:
        lander._write(Seq(0), Seq(1), frozenset())
    assert caught.value.code == (code if kind is LakeUnavailable else "engine")

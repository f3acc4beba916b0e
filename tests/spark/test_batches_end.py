"""A driver that ends while a table's write is about to be tried again."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from millstream.errors import EngineError, LakeUnavailable, MillstreamError, Retry, codes_of
from millstream.model.ids import TableId
from millstream.model.positions import Seq
from millstream.spark.batch_landing import BatchLander, Landed
from millstream.spark.executor_tasks import TableError
from millstream.spark.unreachable_lake import patiently


class Lander(BatchLander):
    runs = 0
    code = "lake_unavailable"
    retry = Retry.BACKOFF

    def _run(self, after: Seq, upto: Seq, *_: Any, **__: Any) -> Landed:
        Lander.runs += 1
        return Landed(after, upto, {}, {TableId(1): TableError(Lander.code, "full", "", Lander.retry)}, {}, {})

    def _try_again(self, tables: Any) -> None:
        self._trying = tables


def test_a_driver_that_ends_leaves_a_batch_to_the_next_run_in_place_of_hurried_tries() -> None:
    nothing: Any = SimpleNamespace(tables={}, schemas=dict)
    lander = Lander(*[nothing] * 8, lambda _: None, lambda: None, wait=lambda _: True)
    assert lander._write(Seq(0), Seq(1), frozenset()) is None
    assert Lander.runs == 1


def test_a_batch_whose_cut_the_lake_does_not_take_is_left_to_the_next_run_if_the_driver_ends() -> None:
    class Written(Lander):
        def _write(self, after: Seq, upto: Seq, *_: Any) -> Landed:
            return Landed(after, upto, {}, {}, {}, {})

    def commit(*_: Any, **__: Any) -> None:
        raise LakeUnavailable("gone")

    nothing: Any = SimpleNamespace(batch_bytes_max=1)
    tables: Any = SimpleNamespace(
        cut=None, quarantine=SimpleNamespace(tables={}), appended=lambda *_: None, commit=commit
    )
    log: Any = SimpleNamespace(
        persisted_upto=lambda: Seq(1), cut=lambda *_, **__: Seq(1), newest_headers=lambda *_, **__: ()
    )
    ends = True
    lander = Written(*[nothing] * 3, log, tables, *[nothing] * 3, lambda _: None, lambda: None, wait=lambda _: ends)
    assert lander.land_next() is False
    assert not lander._lake_answered
    ends = False
    with pytest.raises(LakeUnavailable):
        lander.land_next()


def test_a_retry_of_a_quarantined_table_waits_for_no_batch_that_waits_for_the_lake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver's loop stood still, and took no notice of a signal."""
    retried: list[Any] = []
    monkeypatch.setattr(Lander, "_catch_up", lambda _, held: retried.append(held), raising=False)
    nothing: Any = SimpleNamespace()
    tables: Any = SimpleNamespace(quarantine=SimpleNamespace(retries_due=lambda: ["held"]))
    lander = Lander(*[nothing] * 4, tables, *[nothing] * 3, lambda _: None, lambda: None)
    with lander.lock:
        lander.retry_held()
    assert retried == []
    lander.retry_held()
    assert retried == ["held"]


@pytest.mark.parametrize(
    ("code", "kind", "tries"),
    [
        ("lake_unavailable", LakeUnavailable, 9),
        ("lake_bucket_missing", LakeUnavailable, 9),
        ("lake_credentials", LakeUnavailable, 1),
        ("lake_forbidden", LakeUnavailable, 1),
        ("lake_conflict", EngineError, 4),
    ],
)
def test_a_lake_that_takes_nothing_is_an_error_with_its_reason(
    code: str, kind: type[MillstreamError], tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing: Any = SimpleNamespace(tables={}, schemas=dict)
    for name, value in (("code", code), ("retry", error_retry(code)), ("runs", 0)):
        monkeypatch.setattr(Lander, name, value)
    pauses: list[float] = []
    lander = Lander(*[nothing] * 8, lambda _: None, lambda: None, wait=pauses.append, clock=lambda: sum(pauses))
    with pytest.raises(kind, match="no table of the lake can be written: full") as caught:
        lander._write(Seq(0), Seq(1), frozenset())
    assert caught.value.code == (code if kind is LakeUnavailable else "engine")
    assert Lander.runs == tries
    assert pauses == sorted(pauses)
    assert tries < 9 or 300 <= sum(pauses) < 360


def error_retry(code: str) -> Retry:
    return next(kind("", code=code).retry for kind, known in codes_of(MillstreamError) if known == code)


def test_a_step_of_the_lake_is_repeated_for_five_minutes_unless_a_person_has_to_act_or_the_driver_ends() -> None:
    pauses: list[float] = []
    tries: list[str] = []

    def step(code: str) -> None:
        tries.append(code)
        raise LakeUnavailable("gone", code=code)

    def run(code: str, wait: Callable[[float], object]) -> int:
        pauses.clear()
        tries.clear()
        with pytest.raises(LakeUnavailable, match="gone"):
            patiently(lambda: step(code), wait=wait, clock=lambda: sum(pauses))
        return len(tries)

    assert run("lake_unavailable", pauses.append) == 9
    assert 300 <= sum(pauses) < 360
    assert run("lake_forbidden", pauses.append) == 1
    assert run("lake_unavailable", lambda _: True) == 1
    assert patiently(lambda: 3) == 3

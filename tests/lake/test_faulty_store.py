"""A lake in an object store that fails: what is tried again, what isn't, and commits whose answer is lost."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from deltalake import DeltaTable
from tests.servers.store_proxy import Fault, FaultRule, StoreProxy

from millstream.errors import LakeUnavailable, Retry
from millstream.lake.commit_cuts import commit_cut, last_cut
from millstream.lake.delta import commits as delta
from millstream.lake.layout import LakeLayout
from millstream.model.ids import StreamId
from millstream.model.positions import Seq
from millstream.testing.s3 import EmbeddedS3

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def lake(store: EmbeddedS3, proxy: StoreProxy, name: str, patience_s: float = 5.0) -> LakeLayout:
    options = store.lake_options | {"AWS_ENDPOINT_URL": proxy.url}
    place = f"{store.url}/{name}"
    return LakeLayout(place, "shop", StreamId(UUID(int=42)), storage_options=options, patience_s=patience_s)


def commit_of(version: int, fault: Fault) -> FaultRule:
    """Fail the first request that writes a version of a table."""
    return FaultRule(fault, "PUT", rf"_delta_log/{version:020}\.json", times=1)


@pytest.mark.long
@pytest.mark.parametrize("fault", [Fault.BUSY, Fault.BUSY_AFTER, Fault.CUT, Fault.CUT_AFTER])
def test_a_commit_is_there_once_whatever_became_of_its_answer(
    store: EmbeddedS3, proxy: StoreProxy, fault: Fault
) -> None:
    layout = lake(store, proxy, fault.value)
    commit_cut(layout, Seq(1), [], committed_at=NOW)
    proxy.set_rules([commit_of(2, fault)])
    began = len(proxy.requests())
    cut = commit_cut(layout, Seq(2), [], committed_at=NOW)
    written = [one for one in proxy.requests()[began:] if one.method == "PUT" and one.path.endswith(".json")]
    assert written[0].fault is fault
    assert {one.path.rsplit("/", 1)[1] for one in written} == {f"{2:020}.json"}
    assert (cut.number, cut.n) == (2, 2)
    found = last_cut(layout)
    assert found is not None
    assert (found.number, found.n) == (2, 2)
    commit_cut(layout, Seq(3), [], committed_at=NOW)
    found = last_cut(layout)
    assert found is not None
    assert found.number == 3


def test_a_commit_that_never_came_is_no_success(store: EmbeddedS3, proxy: StoreProxy) -> None:
    layout = lake(store, proxy, "never", patience_s=0.5)
    commit_cut(layout, Seq(1), [], committed_at=NOW)
    proxy.set_rules([FaultRule(Fault.CUT, "PUT", r"_delta_log/\d+\.json")])
    with pytest.raises(LakeUnavailable) as caught:
        commit_cut(layout, Seq(2), [], committed_at=NOW)
    assert caught.value.retry is Retry.BACKOFF
    found = last_cut(layout)
    assert found is not None
    assert found.n == 1


def test_a_position_is_of_the_files_that_were_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that came between both was counted: readers missed its rows, or called the table another program's."""
    layout = LakeLayout(str(tmp_path), "shop", StreamId(UUID(int=42)))
    commit_cut(layout, Seq(1), [], committed_at=NOW)

    class Overtaken(DeltaTable):
        """A table that gets a commit right after it was opened."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            monkeypatch.undo()
            commit_cut(layout, Seq(2), [], committed_at=NOW)

    monkeypatch.setattr(delta, "DeltaTable", Overtaken)
    cut = last_cut(layout)
    assert cut is not None
    assert cut.n == 1
    later = last_cut(layout)
    assert later is not None
    assert later.n == 2


def test_a_busy_store_is_asked_again_and_a_refusal_is_not(store: EmbeddedS3, proxy: StoreProxy) -> None:
    layout = lake(store, proxy, "busy", patience_s=1.0)
    commit_cut(layout, Seq(1), [], committed_at=NOW)
    for fault, again in ((Fault.BUSY, True), (Fault.FORBIDDEN, False)):
        began = len(proxy.requests())
        proxy.set_rules([FaultRule(fault)])
        with pytest.raises(LakeUnavailable) as caught:
            last_cut(layout)
        paths = [one.path for one in proxy.requests()[began:]]
        assert (len(paths) > len(set(paths))) is again
        assert caught.value.code == ("lake_unavailable" if again else "lake_forbidden")
        assert caught.value.retry is (Retry.BACKOFF if again else Retry.OPERATOR)
    proxy.set_rules([])
    assert last_cut(layout) is not None

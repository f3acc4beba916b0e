"""A replica identity decides whether a table is copied, and its changes move the table's state."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from millstream.app.table_requests import pause_table
from millstream.capture.source_tables import SourceTable
from millstream.capture.table_states import after_identity_change, copy_or_history_only, request_copy_again
from millstream.catalog import Catalog, TableRow, TableState
from millstream.codec.pgoutput import Relation
from millstream.errors import UsageError
from millstream.model.ids import SchemaVersion, ShardId, SourceId, StreamId, TableId
from millstream.model.names import parse_qualified_name
from millstream.model.schema import ReplicaIdentity, TableKind


def in_state(state: TableState, details: Mapping[str, Any] | None = None) -> TableRow:
    return TableRow(
        id=TableId(1),
        stream=StreamId(UUID(int=1)),
        source=SourceId(1),
        relation_oid=16384,
        namespace="public",
        name="orders",
        kind=TableKind.TABLE,
        shard=ShardId(0),
        state=state,
        reason="",
        details=dict(details or {}),
        schema_version=SchemaVersion(1),
        copy_id="",
        changed_us=0,
    )


def test_a_usable_identity_requests_a_copy_and_any_other_table_goes_into_history_with_the_reason() -> None:
    assert copy_or_history_only(usable=True, reason="a publication sends it now") == (
        TableState.COPY_REQUESTED,
        "a publication sends it now",
    )
    state, reason = copy_or_history_only(usable=False, reason="a publication sends it now")
    assert state is TableState.HISTORY_ONLY
    assert "no key" in reason


@pytest.mark.parametrize("state", [TableState.STREAMING, TableState.COPYING, TableState.COPY_REQUESTED])
def test_a_followed_table_whose_identity_went_continues_in_history_only(state: TableState) -> None:
    assert after_identity_change(in_state(state), usable=False) == copy_or_history_only(usable=False)
    assert after_identity_change(in_state(state), usable=True) is None


def test_a_table_in_history_whose_identity_came_is_copied() -> None:
    changed = after_identity_change(in_state(TableState.HISTORY_ONLY), usable=True)
    assert changed == (TableState.COPY_REQUESTED, "it has got a usable replica identity")
    assert after_identity_change(in_state(TableState.HISTORY_ONLY), usable=False) is None


def test_a_table_in_history_for_another_cause_and_a_quarantined_one_stay_as_they_are() -> None:
    held = in_state(TableState.HISTORY_ONLY, {"cause": "another"})
    assert after_identity_change(held, usable=True) is None
    for usable in (True, False):
        assert after_identity_change(in_state(TableState.QUARANTINED), usable=usable) is None


def test_the_command_that_a_held_copy_waits_for_names_its_table_in_a_shell(tmp_path: Path) -> None:
    """Without quotes `public."Orders"` was `public.orders` there."""
    with Catalog(tmp_path / "catalog.db") as catalog:
        stream = catalog.resolve_stream("shop")
        source = catalog.resolve_source(stream, 7, "shop", 1)
        row = catalog.table_for(stream, source, 16384, "public", "Old Orders", state=TableState.STREAMING)
        facts = SourceTable(
            oid=16384,
            namespace="public",
            name="Old Orders",
            partitioned=False,
            replica_identity=ReplicaIdentity.DEFAULT,
            usable=True,
            generated_identity=(),
            relation=Relation(16384, "public", "Old Orders", ReplicaIdentity.DEFAULT, (), b""),
            key=(),
            row_estimate=0,
            size_bytes=2,
            relfilenode=0,
            layout=(),
            key_constraint=0,
            partitions=(),
            numbers_max=0,
        )
        request_copy_again(catalog, row, facts, "its key changed", held_above=1)
        reason = catalog.table(row.id).reason
        with pytest.raises(UsageError) as refused:
            pause_table(catalog, stream, 'public."Old Orders"')
        for text in (reason, refused.value.hint):
            (command,) = re.findall("`(millstream tables copy .*)`", text)
            assert parse_qualified_name(shlex.split(command)[-1]) == ("public", "Old Orders")

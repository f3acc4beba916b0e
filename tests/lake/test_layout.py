"""Folders and names of lake tables."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.lake.layout import LakeLayout, folder_name, has_current
from millstream.model.schema import ReplicaIdentity, TableKind, TableSchema

IDENTIFIERS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=63)


@given(one=st.tuples(IDENTIFIERS, IDENTIFIERS), other=st.tuples(IDENTIFIERS, IDENTIFIERS))
def test_no_two_tables_share_a_folder_even_where_case_is_ignored(one: tuple[str, str], other: tuple[str, str]):
    folders = [folder_name(*name) for name in (one, other)]
    assert (folders[0].lower() == folders[1].lower()) == (one == other)


@given(name=st.tuples(IDENTIFIERS, IDENTIFIERS))
def test_folders_are_short_and_plain_and_never_hidden(name: tuple[str, str]):
    folder = folder_name(*name)
    assert re.fullmatch(r"[a-z0-9~][a-z0-9_~]*\.[a-z0-9~][a-z0-9_~]*|[a-z0-9_~.]{183,200}", folder), folder
    assert len(folder) <= 200


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        (("public", "orders"), "public.orders"),
        (("public", "Orders"), "public.~4frders"),
        (("a.b", "c"), "a~2eb.c"),
        (("public", "_messages"), "public.~5fmessages"),
        (("public", "naïve"), "public.na~c3~afve"),
    ],
)
def test_plain_names_stay_as_they_are(name: tuple[str, str], folder: str):
    assert folder_name(*name) == folder


def test_the_app_id_names_the_stream_the_pipeline_the_view_and_the_table(layout: LakeLayout, orders: TableSchema):
    assert layout.app_id("history", orders.table_id) == f"millstream/{layout.stream_id}/lake/history/3"
    assert pickle.loads(pickle.dumps(layout)) == layout


def test_rows_that_nothing_tells_apart_have_no_current(orders: TableSchema):
    assert has_current(orders)
    keyless = replace(orders, key=(), identity=())
    assert not has_current(keyless)
    assert has_current(replace(keyless, replica_identity=ReplicaIdentity.FULL))
    assert not has_current(replace(orders, kind=TableKind.MESSAGES))

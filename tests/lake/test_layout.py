"""Folders and names of lake tables."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.lake.layout import LakeLayout, folder_name, folders_in, has_current, is_folder_of
from millstream.model.ids import TableId
from millstream.model.schema import ReplicaIdentity, TableKind, TableSchema

IDENTIFIERS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=63)


@given(one=st.tuples(IDENTIFIERS, IDENTIFIERS), other=st.tuples(IDENTIFIERS, IDENTIFIERS))
def test_no_two_names_share_a_folder(one: tuple[str, str], other: tuple[str, str]):
    assert (folder_name(*one) == folder_name(*other)) == (one == other)


@given(name=st.tuples(IDENTIFIERS, IDENTIFIERS), id_=st.integers(1, 2**62), other=st.integers(1, 2**62))
def test_an_id_keeps_folders_apart_even_if_case_is_ignored(name: tuple[str, str], id_: int, other: int):
    swapped = tuple("".join(char.swapcase() if char.isascii() else char for char in part) for part in name)
    plain, with_id, with_other = (
        folder_name(*name),
        folder_name(*swapped, TableId(id_)),
        folder_name(*name, TableId(other)),
    )
    assert plain.lower() not in {with_id.lower(), with_other.lower()}
    assert (with_id.lower() == with_other.lower()) <= (id_ == other)
    assert is_folder_of(plain, *name)
    assert is_folder_of(with_other, *name)
    assert is_folder_of(with_id, *name) == (swapped == name)


@given(name=st.tuples(IDENTIFIERS, IDENTIFIERS))
def test_folders_are_short_and_plain(name: tuple[str, str]):
    folder = folder_name(*name)
    assert re.fullmatch(r"[\w~-]+\.[\w~-]+|[\w~.-]{183,200}", folder, re.ASCII), folder
    assert len(folder) <= 200


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        (("public", "orders"), "public.orders"),
        (("public", "Orders"), "public.Orders"),
        (("Shop-1", "a b"), "Shop-1.a~20b"),
        (("_shop", "_x"), "_shop._x"),
        (("a.b", "c"), "a~2eb.c"),
        (("public", "_messages"), "public._messages"),
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


def test_the_folders_of_a_folder_are_those_that_a_path_finds(tmp_path: Path) -> None:
    for name in ("public.a", "public.b"):
        (tmp_path / "current" / name).mkdir(parents=True)
    (tmp_path / "current" / "public.c").symlink_to(tmp_path / "current" / "public.a")
    (tmp_path / "current" / "public.gone").symlink_to(tmp_path / "gone")
    (tmp_path / "current" / "file").write_text("")
    found = folders_in(str(tmp_path / "current"))
    assert found == {"public.a", "public.b", "public.c"}
    assert found == {path.name for path in (tmp_path / "current").iterdir() if path.is_dir()}
    assert folders_in(str(tmp_path / "history")) == frozenset()

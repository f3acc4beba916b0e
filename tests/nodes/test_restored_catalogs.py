"""`restore` where the store's catalog is older than the log: every table's rows stay under its own name."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import zlib
from pathlib import Path

import pytest
from tests.app.homes import run
from tests.nodes.nodes import STREAM, eventually, nodes

import millstream
from millstream.home.home import Home

pytestmark = pytest.mark.siege


def append(home: Path, table: str, *names: str, key: str | None = None) -> bool:
    with millstream.open(home) as opened:
        rows = [{"name": name} for name in names]
        return opened.append(STREAM, table, rows, idempotency_key=key, deadline_s=100).duplicate


def names_in(home: Path, table: str) -> list[str]:
    with millstream.open(home) as opened:
        return [row["name"] for batch in opened.read(STREAM, table=table) for row in batch.to_pylist()]


def ids_of_tables(home: Path) -> dict[str, int]:
    with Home(home, needs_source=False).open_catalog() as catalog:
        return {row.name: row.id for row in catalog.tables(catalog.stream(STREAM).id)}


def tables_in(folder: Path) -> set[str]:
    """Return the tables of the catalog in a folder of a store; empty if it has none."""
    found = sorted(folder.glob("*/*"))
    if not found:
        return set()
    with contextlib.closing(sqlite3.connect(":memory:")) as catalog:
        catalog.deserialize(zlib.decompress(found[-1].read_bytes()))
        return {name for (name,) in catalog.execute("SELECT name FROM tables")}


@pytest.mark.parametrize("is_saved", [True, False], ids=["older", "gone"])
def test_rows_come_back_under_their_own_tables_if_the_stored_catalog_is_older(tmp_path: Path, is_saved: bool) -> None:
    """The store gets a changed catalog later than the records that it is about."""
    store, saved = tmp_path / "store", tmp_path / "saved"
    store.mkdir()
    with nodes(tmp_path, "a", acks="object", more=f'object_store = "{store.as_uri()}"\n') as (a,):
        a.start("owner")
        a.start("serve")
        catalog = store / STREAM / f"{0:010}" / "documents" / "catalog"

        def is_stored() -> bool:
            append(a.home, "orders", "first")  # a catalog that has changed goes with the next record
            return tables_in(catalog) == {"orders"}

        eventually(is_stored, "the catalog is stored", a)
        shutil.copytree(catalog, saved)
        append(a.home, "clicks", "here")
        append(a.home, "visits", "now", key="a visit")
        append(a.home, "orders", "again")
        orders = names_in(a.home, "orders")
        a.kill()
        before = ids_of_tables(a.home)
        assert set(before) == {"orders", "clicks", "visits"}
        shutil.rmtree(a.home)
    shutil.rmtree(catalog)
    if is_saved:
        shutil.copytree(saved, catalog)

    home = tmp_path / "restored"
    done = run(tmp_path, "restore", "--from", store.as_uri(), "--stream", STREAM, str(home))
    assert done.returncode == 0, done.stderr
    # A new table is the first to get a number.
    assert append(home, "late", "new") is False
    assert append(home, "visits", "now", key="a visit") is True
    append(home, "clicks", "there")
    assert {table: names_in(home, table) for table in ("orders", "clicks", "visits", "late")} == {
        "orders": orders,
        "clicks": ["here", "there"],
        "visits": ["now"],
        "late": ["new"],
    }
    after = ids_of_tables(home)
    assert {name: after[name] for name in before} == before
    assert after["late"] > max(before.values())
    verified = run(home, "wal", "verify")
    assert "all is well" in verified.stdout, verified

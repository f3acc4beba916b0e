"""`tables copy T --forget`: a person's data, deleted at the source, is nowhere in the home once the log has let it go."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import ManifestFile
from tests.app.landed import LandedHome
from tests.cli.in_process import command

import millstream
from millstream.administration import rebuild
from millstream.administration.doctor import _alerts
from millstream.administration.initialize import make_home
from millstream.administration.rebuild import forget_table
from millstream.app.open_home import OpenHome
from millstream.app.status import collect_status
from millstream.app.table_requests import copy_table
from millstream.capture.column_rules import rows_before_rules
from millstream.catalog import TableState
from millstream.errors import HomeBusy, LakeBehind, PositionError, UnknownTable, UsageError
from millstream.home.home import Home
from millstream.model.positions import StreamToken
from millstream.processes.role_locks import RoleLock
from millstream.protocol.retention import Retention, RetentionBounds
from millstream.testing.postgres import EmbeddedPostgres
from millstream.wal.segment_deletion import drop_segments

SECRET = "canary-5b2e"
LOG = """
[streams.shop.log]
segment_bytes = "1MiB"
disk_used_max = 1.0
"""


def values_in(folder: Path) -> list[str]:
    """Return the files below a folder that have the value, also in Parquet's compressed pages."""
    found = []
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            rows = repr(pq.ParquetFile(path).read().to_pylist()) if path.suffix == ".parquet" else ""
            if SECRET.encode() in data or SECRET in rows:
                found.append(str(path.relative_to(folder)))
    return found


def bounds_in(folder: Path) -> list[str]:
    """Return Iceberg's manifests below a folder that have the value among the bounds of columns."""
    found = []
    for path in folder.rglob("*-m*.avro"):
        io = PyArrowFileIO()
        manifest = ManifestFile.from_args(manifest_path=str(path), manifest_length=path.stat().st_size, content=0)
        entries = manifest.fetch_manifest_entry(io, discard_deleted=False)
        if SECRET in repr([(entry.data_file.lower_bounds, entry.data_file.upper_bounds) for entry in entries]):
            found.append(str(path.relative_to(folder)))
    return found


def with_users(folder: Path, server: EmbeddedPostgres) -> LandedHome:
    """Return a home that has landed a person's row, and another one."""
    with server.connect() as connection:
        connection.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
        connection.execute(f"INSERT INTO users VALUES (1, '{SECRET}'), (2, 'Ben')")
    landed = LandedHome(folder / "home", server.dsn())
    landed.catch_up()
    return landed


def test_a_person_s_data_is_gone_from_the_lake_at_once_and_from_the_log_with_its_segments(tmp_path: Path) -> None:
    with EmbeddedPostgres(18, fsync=False) as server:
        with server.connect() as connection:
            connection.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
            connection.execute("ALTER TABLE users REPLICA IDENTITY FULL")
            connection.execute(f"INSERT INTO users VALUES (1, '{SECRET}'), (2, 'Ben')")
        landed = LandedHome(tmp_path / "home", server.dsn())
        path = landed.home.path
        file = landed.home.config_file
        file.write_text(
            file.read_text().replace(
                "[streams.shop.lake]", '[streams.shop.lake]\nviews = ["current", "history", "scd2"]'
            )
            + LOG
        )
        landed.home = Home(path)
        landed.catch_up()
        with millstream.open(path) as home:
            consumers = home.consumers("shop")
            consumers.create("mailer", tables=["public.users"], start="earliest", max_deliver=1)
            with home.consume("shop", "mailer", wait_s=1) as messages:
                assert [message.nack() for message in messages] == ["nacked"] * 2
            assert len(consumers.dead("mailer")["dead"]) == 2
        assert values_in(path / "lake")
        with server.connect() as connection:
            connection.execute("UPDATE users SET name = 'Bea' WHERE id = 2")
            connection.execute("DELETE FROM users WHERE id = 1")
        landed.capture()  # the delete hasn't landed
        done = command("--home", str(path), "tables", "copy", "public.users", "--forget")
        assert done.returncode == 0, done.stderr
        assert b"public.users: its older records are deleted, and 2 dead letters" in done.stderr
        assert values_in(path / "lake") == []
        with millstream.open(path) as home:
            assert home.consumers("shop").dead("mailer")["dead"] == []
            with pytest.raises(LakeBehind, match="is being rebuilt from its source"):
                home.query("FROM public.users")
        landed.catch_up()
        with millstream.open(path) as home:
            assert home.query("FROM public.users").to_pylist() == [{"id": 2, "name": "Bea"}]
            assert SECRET not in repr(home.query('FROM history."public.users"').to_pylist())
        assert values_in(path / "lake") == []
        (table,) = collect_status(landed.home)["streams"][0]["tables"]
        assert (table["state"], table["raw_values"]["log"], table["raw_values"]["history"]) == (
            "streaming",
            True,
            False,
        )
        (found,) = (each for each in _alerts(landed.home) if each.code == "raw_values_kept")
        assert found.message.startswith("public.users: older records are in the log until retention drops it")
        with server.connect() as connection:
            connection.execute(
                "INSERT INTO users SELECT n, string_agg(md5(random()::text), '') FROM generate_series(3, 6) n, generate_series(1, 30000) GROUP BY n"
            )
        landed.catch_up()
        bounds = RetentionBounds(age_s=1e9, size_bytes=0, bytes_max=1 << 40)
        assert drop_segments(str(path / "data" / "wal" / "shop"), Retention(), bounds).dropped
        assert values_in(path) == []


def test_a_table_that_is_being_copied_or_that_applications_write_is_refused(tmp_path: Path) -> None:
    with EmbeddedPostgres(18, fsync=False) as server:
        with server.connect() as connection:
            connection.execute("CREATE TABLE users (id int PRIMARY KEY)")
            connection.execute("INSERT INTO users VALUES (1)")
        landed = LandedHome(tmp_path / "home", server.dsn())
        landed.catch_up()
        with millstream.open(landed.home.path) as home:
            home.append("shop", "clicks", [{"id": 1}])
        landed.land()
        with pytest.raises(UsageError, match="applications write"):
            forget_table(landed.home, "public.clicks")
        with landed.home.open_catalog() as catalog:
            row = catalog.find_table(catalog.stream("shop").id, "public", "users")
            catalog.set_state(row.id, TableState.COPYING)
        with pytest.raises(UsageError, match="being copied"):
            forget_table(landed.home, "public.users")
        with landed.home.open_catalog() as catalog:
            catalog.set_state(row.id, TableState.STREAMING)
        with (
            RoleLock.take(landed.home.run_folder, "forget"),
            pytest.raises(HomeBusy, match="copy --forget`"),
        ):
            forget_table(landed.home, "public.users")
        with millstream.open(landed.home.path) as home:
            assert home.query("FROM public.users").to_pylist() == [{"id": 1}]


def test_a_table_whose_earlier_name_another_took_is_erased_once_it_has_another_record(tmp_path: Path) -> None:
    """The command said that nothing of it had landed, while its records lay in the other table's folder."""
    with EmbeddedPostgres(18, fsync=False) as server:
        landed = with_users(tmp_path, server)
        with server.connect() as connection:
            connection.execute("DELETE FROM users WHERE id = 1")
            connection.execute("ALTER TABLE users RENAME TO clients")
            connection.execute("CREATE TABLE users (id int PRIMARY KEY)")
            connection.execute("INSERT INTO users VALUES (7)")
        landed.catch_up()
        history = landed.home.path / "lake/shop/history"
        assert values_in(history)
        with server.connect() as connection:
            connection.execute("UPDATE clients SET name = 'Bea'")
        landed.capture()
        with pytest.raises(UnknownTable, match=r"lies under its earlier name, public\.users") as refused:
            forget_table(landed.home, "public.clients")
        assert "Change a row of public.clients" in refused.value.hint
        landed.land()
        forget_table(landed.home, "public.clients")
        assert values_in(history) == []
        with millstream.open(landed.home.path) as home:
            assert home.query("FROM public.users").to_pylist() == [{"id": 7}]


def test_a_person_s_data_is_gone_from_iceberg_tables_and_their_metadata_at_once(tmp_path: Path) -> None:
    """The command was refused with `lake_format_unsupported`."""
    with EmbeddedPostgres(18, fsync=False) as server:
        with server.connect() as connection:
            connection.execute("CREATE TABLE users (name text PRIMARY KEY, age int)")
            connection.execute(f"INSERT INTO users VALUES ('{SECRET}', 30), ('Ben', 40)")
        path = tmp_path / "home"
        made = make_home(path, stream="shop", source=server.dsn(), tables=("public.*",), lake_format="iceberg")
        made.file.write_text(
            made.file.read_text().replace(
                "[streams.shop.lake]", '[streams.shop.lake]\nviews = ["current", "history", "scd2"]'
            )
        )
        landed = LandedHome(path, None)
        landed.catch_up()
        with server.connect() as connection:
            connection.execute("UPDATE users SET age = age + 1")
        landed.catch_up()
        with landed.home.open_catalog() as catalog:
            before = StreamToken.scalar(catalog.stream("shop").id, landed.land())
        with server.connect() as connection:
            connection.execute(f"DELETE FROM users WHERE name = '{SECRET}'")
        landed.catch_up()
        assert len(values_in(path / "lake")) > 1
        assert bounds_in(path / "lake")
        forget_table(landed.home, "public.users")
        assert values_in(path / "lake") == []
        assert bounds_in(path / "lake") == []
        with millstream.open(path) as home:
            with pytest.raises(LakeBehind, match="is being rebuilt from its source"):
                home.query("FROM public.users")
            with pytest.raises(PositionError, match="its history begins after"):
                home.query("FROM public.users", as_of=before)
        landed.catch_up()
        with millstream.open(path) as home:
            assert home.query("FROM public.users").to_pylist() == [{"name": "Ben", "age": 41}]
            with pytest.raises(PositionError, match="its history begins after"):
                home.query("FROM public.users", as_of=before)
        assert values_in(path / "lake") == []
        assert bounds_in(path / "lake") == []
        tables = SqlCatalog("millstream", uri=f"sqlite:///{path}/data/iceberg.db")
        cuts = tables.load_table("shop._commits").scan().to_arrow().sort_by("n").to_pylist()
        for name, snapshot_id in cuts[-1]["tables"]:
            table = tables.load_table(name)
            rows = table.scan(snapshot_id=snapshot_id).to_arrow()
            assert rows.num_rows, name
        with server.connect() as connection:
            connection.execute("INSERT INTO users VALUES ('Cid', 50)")
        landed.catch_up()
        with millstream.open(path) as home:
            assert home.query("SELECT count(*) n FROM public.users").to_pylist() == [{"n": 2}]


class _EndedError(Exception):
    """Ends a call where a kill would."""


@pytest.mark.long
@pytest.mark.parametrize("step", ["await_outcome", "note_forgotten", "_drop_dead_letters"])
def test_a_call_that_was_ended_at_any_step_is_completed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def ends(*_: object) -> None:
        raise _EndedError

    with EmbeddedPostgres(18, fsync=False) as server:
        landed = with_users(tmp_path, server)
        with server.connect() as connection:
            connection.execute("DELETE FROM users WHERE id = 1")
        with monkeypatch.context() as ended:
            ended.setattr(rows_before_rules if step == "note_forgotten" else rebuild, step, ends)
            with pytest.raises(_EndedError):
                forget_table(landed.home, "public.users")
        with landed.home.open_catalog() as catalog:
            stream = catalog.stream("shop").id
            assert catalog.find_table(stream, "public", "users").is_copy_held
            if step == "await_outcome":
                # The console offers this of a held copy, and its rows would go with the older ones.
                with pytest.raises(UsageError, match="its copy begins once they are gone"):
                    copy_table(catalog, stream, "public.users")
        landed.capture()
        landed.land(fold=False)
        assert forget_table(landed.home, "public.users") == 0
        assert values_in(landed.home.path / "lake") == []
        landed.catch_up()
        with millstream.open(landed.home.path) as home:
            assert home.query("FROM public.users").to_pylist() == [{"id": 2, "name": "Ben"}]


def test_the_records_of_settled_dead_letters_leave_the_consumers_file(tmp_path: Path) -> None:
    """A letter that was acknowledged wasn't listed any longer, and its record stayed in the file."""
    (tmp_path / "millstream.toml").write_text('[streams.web]\n[streams.web.keys]\n"public.users" = ["id"]\n')
    home = Home(tmp_path)
    with OpenHome(home) as opened:
        opened.append("web", "users", {"id": 1, "name": SECRET})
        consumers = opened.consumers("web")
        consumers.create("mailer", start="earliest", max_deliver=1)
        with opened.consume("web", "mailer", wait_s=10) as messages:
            message = next(messages)
            message.nack()
            assert (len(consumers.dead("mailer")["dead"]), message.ack()) == (1, "acked")
    assert values_in(home.data / "delivery") == ["web/consumers.log"]
    with home.open_catalog() as catalog:
        (users,) = catalog.tables(catalog.stream("web").id)
    assert rebuild._drop_dead_letters(home, "web", users) == 0
    assert values_in(home.data / "delivery") == []

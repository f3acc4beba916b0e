"""The options and the address of a lake's object store: one name each, and no store in which lakes aren't tested."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.administration.initialize import make_home
from millstream.config.file import load_config
from millstream.config.stream_checks import OPTIONS
from millstream.errors import ConfigError, UsageError


def mistake(folder: Path, location: str, options: str) -> ConfigError:
    file = folder / "millstream.toml"
    file.write_text(f'[streams.web.lake]\nlocation = "{location}"\n[streams.web.lake.storage_options]\n{options}\n')
    with pytest.raises(ConfigError) as caught:
        load_config(file, {})
    assert caught.value.exit_code == 2
    return caught.value


def test_every_listed_option_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "millstream.toml"
    for location in ("s3://bucket/lake", "lake"):
        lines = "".join(f'{name} = "https://x"\n' for name in OPTIONS["s3"])
        file.write_text(f'[streams.web.lake]\nlocation = "{location}"\n[streams.web.lake.storage_options]\n{lines}')
        assert set(load_config(file, {}).config.streams["web"].lake.storage_options) == set(OPTIONS["s3"])


@pytest.mark.parametrize("location", ["s3://bucket/lake", "lake"])
@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("aws_region", "AWS_REGION"),
        ("region", "AWS_REGION"),
        ("AWS_ENDPOINT", "AWS_ENDPOINT_URL"),
        ("AWS_ACCES_KEY_ID", "AWS_ACCESS_KEY_ID"),
        ('"secret-access-key"', "AWS_SECRET_ACCESS_KEY"),
        ("allow_http", "AWS_ALLOW_HTTP"),
    ],
)
def test_another_name_is_refused_and_the_nearest_right_one_is_named(
    tmp_path: Path, location: str, written: str, meant: str
) -> None:
    error = mistake(tmp_path, location, f'{written} = "s3cret"')
    assert error.code == "storage_option_unknown"
    assert f"did you mean {meant}? allowed here: AWS_ACCESS_KEY_ID, " in error.message
    assert error.details["line"] == 4
    assert "s3cret" not in error.message


@pytest.mark.parametrize(
    "location", ["ftp://host/lake", "abfss://box@account.dfs.core.windows.net/lake", "s3a://bucket/lake"]
)
def test_a_kind_of_store_without_a_test_is_refused_in_the_file_and_by_init(tmp_path: Path, location: str) -> None:
    error = mistake(tmp_path, location, "")
    assert error.code == "lake_scheme_unsupported"
    assert "s3://bucket/folder" in error.message
    with pytest.raises(ConfigError, match="s3://bucket/folder") as caught:
        make_home(tmp_path / "new", stream="web", source=None, tables=["public.*"], location=location)
    assert caught.value.code == "lake_scheme_unsupported"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("location", ["s3://", "s3:///lake"])
def test_an_address_without_a_bucket_is_refused_in_the_file_and_by_init(tmp_path: Path, location: str) -> None:
    error = mistake(tmp_path, location, "")
    assert (error.code, error.details["key"]) == ("config", "streams.web.lake.location")
    assert "names no bucket: write s3://bucket/folder" in error.message
    with pytest.raises(ConfigError, match=r"--location: .* names no bucket"):
        make_home(tmp_path / "new", stream="web", source=None, tables=["public.*"], location=location)
    assert not (tmp_path / "new").exists()


def test_an_endpoint_without_a_scheme_is_refused(tmp_path: Path) -> None:
    """It was reported as a lack of keys."""
    error = mistake(tmp_path, "s3://bucket/lake", 'AWS_ENDPOINT_URL = "127.0.0.1:9000"')
    assert error.details["key"] == "streams.web.lake.storage_options.AWS_ENDPOINT_URL"
    assert "must begin with https://" in error.message


@pytest.mark.parametrize("location", ["data", "data/wal", "./data/../data/lake", "..", "linked"])
def test_a_lake_among_the_homes_own_files_is_refused_in_the_file_and_by_init(tmp_path: Path, location: str) -> None:
    """With `data/wal`, the tables lay in the folder of the stream's log: whoever removed that lake removed the log."""
    home = tmp_path / "web"
    (home / "data" / "wal").mkdir(parents=True)
    (home / "linked").symlink_to(home / "data")
    error = mistake(home, location, "")
    assert (error.code, error.details["key"]) == ("config", "streams.web.lake.location")
    assert "among the log and the catalog" in error.message
    (home / "millstream.toml").unlink()
    with pytest.raises(ConfigError, match=r"--location: .* name another folder"):
        make_home(home, stream="web", source=None, tables=["public.*"], location=location)
    assert not (home / "millstream.toml").exists()


def test_a_lake_next_to_the_homes_own_files_is_taken(tmp_path: Path) -> None:
    for location in (".", "database", "../lakes", str(tmp_path)):
        (tmp_path / "millstream.toml").write_text(f'[streams.web.lake]\nlocation = "{location}"\n')
        assert load_config(tmp_path / "millstream.toml", {}).config.streams["web"].lake.location == location


@pytest.mark.parametrize("location", ["~nobody-of-that-name/lake", "a\\u0000b"])
def test_a_location_that_is_no_path_is_refused(tmp_path: Path, location: str) -> None:
    assert "names no folder" in mistake(tmp_path, location, "").message


@pytest.mark.parametrize(
    ("catalog", "location", "expected"),
    [
        (None, None, {}),
        ("sql", None, {}),
        ("rest=https://catalog.example.com/api", None, {"type": "rest", "uri": "https://catalog.example.com/api"}),
        ("rest=http://localhost:8181", "tables", {"type": "rest", "uri": "http://localhost:8181"}),
    ],
)
def test_init_writes_the_catalog_of_iceberg_tables(
    tmp_path: Path, catalog: str | None, location: str | None, expected: dict[str, str]
) -> None:
    made = make_home(
        tmp_path,
        stream="web",
        source=None,
        tables=["public.*"],
        lake_format="iceberg",
        location=location,
        catalog=catalog,
    )
    lake = load_config(made.file, {}).config.streams["web"].lake
    assert (lake.format, lake.catalog, lake.location) == ("iceberg", expected, location or "lake")
    assert lake.lies_in_catalog == bool(expected and location is None)


@pytest.mark.parametrize(
    ("lake_format", "catalog"),
    [("delta", "sql"), ("iceberg", "hive"), ("iceberg", "rest=catalog"), ("iceberg", "rest=https://me:s3cr3t@catalog")],
)
def test_init_refuses_a_catalog_that_is_none(tmp_path: Path, lake_format: str, catalog: str) -> None:
    with pytest.raises(UsageError, match="--catalog") as caught:
        make_home(
            tmp_path / "new", stream="web", source=None, tables=["public.*"], lake_format=lake_format, catalog=catalog
        )
    assert "s3cr3t" not in str(caught.value)
    assert not (tmp_path / "new").exists()

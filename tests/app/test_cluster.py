"""A cluster's checks as `doctor` reports them, and the packages of its executors."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest

from millstream.administration import doctor as doctors
from millstream.administration import executor_packages
from millstream.administration.doctor import Diagnosis, as_checks, examine
from millstream.administration.executor_packages import EXTRA, _distributions
from millstream.app import cluster
from millstream.app.cluster import lacks_encryption
from millstream.config.file import load_config
from millstream.errors import ConfigError, EngineError, UsageError
from millstream.home.config_mapping import flight_address
from millstream.home.home import Home
from millstream.spark.cluster_checks import CHECKS
from millstream.spark.executor_access import FlightAddress
from millstream.testing.errors import coded

BOTH = {"spark.authenticate": "true", "spark.network.crypto.enabled": "TRUE"}


@pytest.mark.parametrize(
    ("master", "conf", "missing"),
    [
        ("spark://10.0.0.1:7077", {}, 2),
        ("spark://10.0.0.1:7077", BOTH, 0),
        ("spark://one:7077,two:7077", {"spark.authenticate": "true"}, 1),
        ("yarn", {}, 2),
        ("spark://127.0.0.1:7077", {}, 0),
        ("spark://localhost:7077", {}, 0),
    ],
)
def test_encryption_is_missed_where_the_network_is_beyond_this_machine(
    master: str, conf: dict[str, str], missing: int
) -> None:
    assert len(lacks_encryption(master, conf)) == missing


def test_checks_are_the_findings_about_executors_and_stores(tmp_path: Path) -> None:
    (tmp_path / "millstream.toml").write_text(
        '[streams.shop.lake]\nlocation = "s3://bucket/lake"\n[streams.web]\n[spark]\nmaster = "spark://h:1"\n'
    )
    home = Home(tmp_path)
    found = [
        Diagnosis("home", "ok", "fine"),
        Diagnosis("spark.master", "ok", "it answers"),
        Diagnosis("executor.log", "log_unreachable", "h can't read it", "home", "Open the port."),
        Diagnosis("lake of web", "ok", "can be written"),
    ]
    checks = as_checks(home, found)
    assert checks == [
        {"name": "spark.master", "ok": True, "detail": "it answers", "hint": ""},
        *(
            {"name": name, "ok": False, "detail": "h can't read it", "hint": "Open the port."}
            for name in ("executor.log", "executor.lake", "clocks")
        ),
    ]
    for code, ok in (
        ("ok", (True, True)),
        ("lake_credentials", (False, False)),
        ("lake_bucket_missing", (True, False)),
        ("lake_forbidden", (True, False)),
        ("lake_unavailable", (False, False)),
    ):
        checks = as_checks(home, [Diagnosis("lake of shop", code, "said")])
        assert [(check["name"], check["ok"]) for check in checks] == [
            ("lake.credentials", ok[0]),
            ("lake.bucket", ok[1]),
        ]


def test_a_dead_master_fails_each_check_of_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(*_: object) -> None:
        raise EngineError("Spark doesn't start")

    (tmp_path / "millstream.toml").write_text('[streams.web]\n[spark]\nmaster = "spark://127.0.0.1:1"\n')
    monkeypatch.setattr(cluster, "cluster_facts", dead)
    monkeypatch.setattr(doctors, "_compiled", lambda *_: "there")
    home = Home(tmp_path)
    found = [one for one in examine(home, lambda _line: None) if one.message == "Spark doesn't start"]
    assert [one.check for one in found] == ["spark.master"], "one failure is one finding"
    assert [(check["name"], check["ok"]) for check in as_checks(home, found)] == [(name, False) for name in CHECKS]


@pytest.mark.parametrize(
    ("master", "notes"),
    [
        ("yarn", ["master_untested", "cluster.encryption"]),
        ("spark://10.0.0.1:7077", ["cluster.encryption"]),
        ("spark://127.0.0.1:1", []),
    ],
)
def test_what_is_untested_or_not_encrypted_about_a_cluster_is_noted_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, master: str, notes: list[str]
) -> None:
    (tmp_path / "millstream.toml").write_text(f'[streams.web]\n[spark]\nmaster = "{master}"\n')
    monkeypatch.setattr(cluster, "cluster_facts", lambda *_: [])
    monkeypatch.setattr(doctors, "_compiled", lambda *_: "there")
    found = [one for one in examine(Home(tmp_path), lambda _line: None) if one.check == "spark" and not one.is_ok]
    assert [one.code for one in found] == notes
    assert not any(one.is_wrong for one in found)


def test_a_catalog_that_is_down_says_nothing_about_the_store_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctors, "_compiled", lambda *_: "there")
    rest = '[streams.web.lake]\nformat = "iceberg"\ncatalog = { type = "rest", uri = "http://127.0.0.1:1" }\n'
    (tmp_path / "millstream.toml").write_text(rest)
    home = Home(tmp_path)
    found = list(examine(home, lambda _line: None))
    assert [one.check for one in found if one.code == "catalog_unreachable"] == ["catalog of web"]
    assert [(check["name"], check["ok"]) for check in as_checks(home, found)] == [("lake.catalog", False)]


def test_the_packed_packages_are_those_of_the_extra_and_none_of_the_drivers() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["executor"]
    assert [requirement.partition(">")[0] for requirement in extra] == list(EXTRA)
    names = {package.metadata["Name"].lower() for package in _distributions()}
    assert {"click", "google-crc32c", "numpy", "pyarrow", "deltalake", "arro3-core", "pyiceberg", "pydantic"} <= names
    assert not names & {"numba", "sqlalchemy", "psycopg", "pyspark", "duckdb", "millstream"}


def test_a_driver_without_pyiceberg_packs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str) -> Distribution:
        if name in {"pyiceberg", "deltalake"} - installed:
            raise PackageNotFoundError(name)
        return distribution(name)

    installed = {"deltalake"}
    monkeypatch.setattr(executor_packages, "distribution", found)
    names = {package.metadata["Name"].lower() for package in _distributions()}
    assert "deltalake" in names
    assert not names & {"pyiceberg", "pydantic"}
    installed.clear()
    with pytest.raises(UsageError, match="executors need deltalake", check=coded("missing_extra")):
        list(_distributions())


def test_executors_need_no_sqlalchemy_for_iceberg_tables() -> None:
    imports = "import millstream.lake.iceberg.format, millstream.lake.iceberg.catalog, millstream.spark.executor_tasks"
    code = f"import sys; sys.modules.update(sqlalchemy=None, psycopg=None, numba=None); {imports}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_executors_get_the_address_of_flight_and_its_certificate(tmp_path: Path) -> None:
    (tmp_path / "millstream.toml").write_text(
        '[streams.shop]\n[flight]\nlisten = "0.0.0.0:8788"\n[http]\ntokens_required = true\n'
        'tls_certificate = "server.pem"\ntls_key = "server.key"\n'
    )
    home = Home(tmp_path)
    with pytest.raises(ConfigError, match=r"server\.pem"):
        flight_address(home)
    (tmp_path / "server.pem").write_bytes(b"certificate")
    assert flight_address(home) == FlightAddress("", 8788, is_tls=True, authority=b"certificate", tokens_required=True)


def test_a_way_to_the_log_that_is_not_implemented_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "millstream.toml"
    file.write_text('[spark]\nlog_access = "object"\n[streams.shop]\n')
    with pytest.raises(ConfigError, match="isn't implemented"):
        load_config(file)

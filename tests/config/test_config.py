from __future__ import annotations

import contextlib
import json
import re
import tomllib
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.administration.initialize import make_home
from millstream.config.file import LoadedConfig, load_config
from millstream.config.interpolation import interpolate, interpolate_dsn
from millstream.config.quantities import size_bytes
from millstream.config.toml_lines import key_lines
from millstream.errors import ConfigError, MillstreamError
from millstream.home.config_mapping import capture_config, lake_layout, log_options, shard_of
from millstream.home.home import Home
from millstream.model.addresses import mask_address
from millstream.model.durations import duration_s
from millstream.model.ids import ShardId, StreamId

GOOD = """\
# a shop
[streams.shop.source]
dsn = "postgresql://app:${SHOP_PASSWORD}@localhost/shop"
tables = [
  "public.*",
  "!public.audit_*",
]

[streams.shop.log]
shards = 2
[streams.shop.shards]
"public.big" = 1
[spark.conf]
"spark.driver.memory" = "2g"
"""
ENVIRON = {"SHOP_PASSWORD": "s3cret"}


def load(folder: Path, text: str, environ: dict[str, str] | None = None) -> LoadedConfig:
    file = folder / "millstream.toml"
    file.write_text(text)
    return load_config(file, ENVIRON if environ is None else environ)


def mistake(folder: Path, text: str, environ: dict[str, str] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, environ)
    assert caught.value.exit_code == 2
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize("name", ["public.*", "!public.users", "a b", "public.users.email", ""])
def test_rules_are_for_a_table_that_is_named_exactly(tmp_path: Path, name: str) -> None:
    error = mistake(
        tmp_path, f"[streams.shop]\nsource.dsn = 'x'\n[streams.shop.tables.'{name}']\nexclude = ['email']\n"
    )
    assert (error.code, error.details["line"]) == ("unknown_table", 3)
    assert "must name one table exactly" in error.message


KEY = "source.hash_key = '0123456789abcdef'"


@pytest.mark.parametrize(
    ("before", "rules", "code", "line"),
    [
        ("source.dsn = 'x'", "hash = ['email']", "hash_key_missing", 4),
        ("source.dsn = 'x'\nsource.hash_key = '0123456789abcde'", "hash = ['email']", "config", 3),
        (f"source.dsn = 'x'\n{KEY}", "hash = ['email']\nredact = ['email']", "rule_clash", 6),
        ("source.dsn = 'x'", "exclude = ['email']\nredact = ['email']", "rule_clash", 5),
        ("source.dsn = 'x'\ntypes = {'public.users.age' = 'text'}", "redact = ['age']", "rule_clash", 5),
        ("source.dsn = 'x'", "exclude = ['a']\n[streams.shop.tables.users]\nexclude = ['b']", "rule_clash", 5),
        ("region = 0", "exclude = ['email']", "rule_not_captured", 3),
        ("source.dsn = 'x'\nkeys = {'public.users' = ['id']}", "exclude = ['email']", "rule_not_captured", 4),
    ],
)
def test_a_rule_that_the_file_alone_shows_to_be_wrong_has_a_code_of_its_own(
    tmp_path: Path, before: str, rules: str, code: str, line: int
) -> None:
    error = mistake(tmp_path, f"[streams.shop]\n{before}\n[streams.shop.tables.'public.users']\n{rules}\n")
    assert (error.code, error.details["line"]) == (code, line), error


def test_a_column_can_be_hashed_if_its_source_has_a_key_that_is_long_enough(tmp_path: Path) -> None:
    text = f"[streams.shop]\nsource.dsn = 'x'\n{KEY}\n[streams.shop.tables.'public.users']\nhash = ['email']\n"
    assert load(tmp_path, text).config.streams["shop"].tables["public.users"].hash == ["email"]
    (tmp_path / "millstream.toml").write_text(text.replace("0123456789abcdef", "${NOT_SET_ANYWHERE}"))
    load_config(tmp_path / "millstream.toml", {}, needs_source=False)


def test_a_delay_of_commit_groups_is_off_unless_it_is_asked_for_and_in_milliseconds(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD).config
    assert log_options(config.streams["shop"], config.replication).group_commit_delay_s == 0
    delayed = GOOD.replace("shards = 2", "shards = 2\ngroup_commit_delay_ms = 2.5")
    config = load(tmp_path, delayed).config
    assert log_options(config.streams["shop"], config.replication).group_commit_delay_s == 0.0025
    wrong = mistake(tmp_path, GOOD.replace("shards = 2", "group_commit_delay_ms = -1"))
    assert "group_commit_delay_ms" in str(wrong)


def test_history_is_kept_for_whole_days(tmp_path: Path) -> None:
    for kept in ("12h", "0d", "36h", "-1d"):
        assert "history_retention" in mistake(tmp_path, f'[streams.shop.lake]\nhistory_retention = "{kept}"\n').message
    config = load(tmp_path, '[streams.shop.lake]\nhistory_retention = "48h"\n').config
    assert config.streams["shop"].lake.history_retention_s == 2 * 86_400


def test_headers_of_frames_are_of_version_2_unless_the_older_one_is_asked_for(tmp_path: Path) -> None:
    plain = load(tmp_path, "[streams.shop.log]\n").config
    older = load(tmp_path, "[streams.shop.log]\nframe_version = 1\n").config
    found = [log_options(one.streams["shop"], one.replication).frame_version for one in (plain, older)]
    assert found == [2, 1]


def test_values_come_from_file_environment_and_defaults_and_say_so(tmp_path: Path) -> None:
    loaded = load(tmp_path, GOOD, ENVIRON | {"MILLSTREAM_SPARK__MASTER": "local[2]", "MILLSTREAM_HOME": "/x"})
    config = loaded.config
    assert config.streams["shop"].source.dsn == "postgresql://app:s3cret@localhost/shop"
    assert config.spark.conf == {"spark.driver.memory": "2g"}
    origins = {path: origin for path, _, origin in loaded.items()}
    assert origins["streams", "shop", "source", "dsn"] == "millstream.toml:3"
    assert origins["streams", "shop", "source", "tables"] == "millstream.toml:4"
    assert origins["streams", "shop", "shards", "public.big"] == "millstream.toml:12"
    assert origins["streams", "shop", "log", "retention_age"] == "default"
    assert origins["spark", "master"] == "env MILLSTREAM_SPARK__MASTER"
    assert origins["http", "listen"] == "default"
    assert config.spark.master == "local[2]"


def test_what_is_shown_holds_no_secret(tmp_path: Path) -> None:
    text = GOOD + '[streams.shop.lake.storage_options]\nAWS_SECRET_ACCESS_KEY = "AKIA"\nAWS_REGION = "eu"\n'
    shown = {path[-2:]: value for path, value, _ in load(tmp_path, text).items()}
    assert shown["source", "dsn"] == "postgresql://app:***@localhost/shop"
    assert shown["storage_options", "AWS_SECRET_ACCESS_KEY"] == "***"
    assert shown["storage_options", "AWS_REGION"] == "eu"


def test_no_secret_is_shown_of_what_others_take(tmp_path: Path) -> None:
    text = (
        '[streams.web.routing]\nto = "far"\n[streams.web.routing.sinks.far]\nkind = "kafka"\nlocation = "h:9092"\n'
        '[streams.web.routing.sinks.far.client]\n"sasl.password" = "s3cret"\n"ssl.key.pem" = "s3cret"\n"client.id" = "me"\n'
        '[streams.web.routing.sinks.beside]\nkind = "redis"\nlocation = "redis://:s3cret@h:6379/0"\n'
        '[streams.web.routing.sinks.away]\nkind = "millstream"\nlocation = "https://h:1"\ntoken = "s3cret"\n'
        '[streams.shop.lake.storage_options]\nAWS_SECRET_ACCESS_KEY = "s3cret"\n'
    )
    azure = '[spark.conf]\n"spark.hadoop.fs.azure.account.key.x.dfs.core.windows.net" = "s3cret"\n'
    loaded = load(tmp_path, GOOD.replace("[spark.conf]\n", azure) + text)
    shown = {path[-1]: value for path, value, _ in loaded.items()}
    assert shown["client.id"] == "me"
    assert "s3cret" not in repr(list(loaded.items()))
    assert "s3cret" not in repr(loaded.config)


def test_the_environment_can_set_what_the_file_leaves_out(tmp_path: Path) -> None:
    environ = {"MILLSTREAM_STREAMS__SHOP__SOURCE__DSN": "host=x", "MILLSTREAM_STREAMS__SHOP__LOG__SHARDS": "3"}
    config = load(tmp_path, '[streams.shop.source]\ntables = ["a"]\n', environ).config
    assert (config.streams["shop"].source.dsn, config.streams["shop"].log.shards) == ("host=x", 3)


@pytest.mark.parametrize(
    ("text", "line", "key", "says"),
    [
        ("a = [\n1,", 2, "", "not TOML"),
        ("[spark]\nmastr = 'x'\n", 2, "spark.mastr", "allowed here: master, log_access, trigger_interval"),
        ("[spark]\ntrigger_interval = 'often'\n", 2, "spark.trigger_interval", 'such as 500ms or 7d; or "auto"'),
        ("[sparc]\n", 1, "sparc", "allowed here: streams, spark, http"),
        ("\n[http]\nlisten = 8787\n", 3, "http.listen", "must be text in quotes"),
        ("[http]\nlisten = 'here'\n", 2, "http.listen", "must be a host and a port up to 65535, such as 127.0.0.1:8787"),
        ("[http]\nlisten = '127.0.0.1:65536'\n", 2, "http.listen", "must be a host and a port up to 65535"),
        ("[spark]\nmaster = 'nonsense'\n", 2, "spark.master", "must be local[*] or local[N], spark://host:port, yarn, or k8s://"),
        ("[spark]\nmaster = 'spark://host'\n", 2, "spark.master", "must be local[*] or local[N], spark://host:port"),
        ("[spark]\nmaster = 'spark://a:7077,b'\n", 2, "spark.master", "must be local[*] or local[N], spark://host:port"),
        ("[spark]\nmaster = 'local[many]'\n", 2, "spark.master", "must be local[*] or local[N], spark://host:port"),
        ("[streams.shop.source]\ndsn = 'x'\nslot = 'A-b'\n", 3, "streams.shop.source.slot", "must be 1 to 63 of: lower-case letters, digits and _"),
        ("[streams.shop.types]\n'public.orders.'='text'", 2, 'streams.shop.types."public.orders."', "must name a column as schema.table.column"),
        ("[streams.shop.log]\nretention_bytes='200%'", 2, "streams.shop.log.retention_bytes", "'200%' is more than the whole disk; a share goes up to 100%"),
        ("[http]\nlisten = 'h:1'\n[flight]\nlisten = 'h:1'\n", 4, "flight.listen", "is the address of [http] listen, too"),
        ("[http]\ntls_certificate = 'a.pem'\n", 2, "http.tls_certificate", "is nothing without tls_key"),
        ("[http]\nclients.'a.example.com' = 'a'\n", 2, "http.clients", "without client_ca"),
        ("[streams.shop.log]\nshards = '2'\n", 2, "streams.shop.log.shards", "must be a whole number"),
        ("[streams.shop]\nlog = 1\n", 2, "streams.shop.log", "must be a table"),
        ("[streams.shop.source]\ntables = ['a', 7]\n", 2, "streams.shop.source.tables[1]", "must be text in quotes"),
        ("[streams.shop.source]\ntables = ['a']\n", 1, "streams.shop.source.dsn", "is required"),
        ("[streams.shop.log]\nshards = 0\n", 2, "streams.shop.log.shards", "must be 1 or more"),
        ("[streams.shop.log]\nshards = 100000\n", 2, "streams.shop.log.shards", "must be at most 1024"),
        ("[http]\nrequest_timeout='0s'", 2, "http.request_timeout", "longer than nothing"),
        ("[streams.shop.source]\ndsn = 'x'\n[streams.shop.log]\nretention_age='7'", 4, "streams.shop.log.retention_age", "not a duration"),
        ("[streams.shop.source]\ndsn = 'x'\nlake.format='excel'", 3, "streams.shop.source.lake", "unknown key"),
        ("[streams.shop]\nsource.dsn = 'x'\nlake.format='excel'", 3, "streams.shop.lake.format", "'delta', 'iceberg' or 'postgres'"),
        ("[streams.shop]\nsource.dsn = 'x'\nlake.engine='auto'", 3, "streams.shop.lake.engine", "unknown key"),
        ("[streams.shop]\nsource = {dsn = 'x'}\n[streams.shop.shards]\n'public.a' = 1", 4, 'streams.shop.shards."public.a"', "shards 0 to 0"),
        ("[streams.shop]\nregion = 1\nlog.frame_version = 1", 3, "streams.shop.log.frame_version", "must be 2"),
        ("[streams.shop.log]\nshards = 2\nframe_version = 1", 3, "streams.shop.log.frame_version", "must be 2"),
        ("[writer]\nname = 'a'\n[streams.shop.log]\nframe_version = 1", 4, "streams.shop.log.frame_version", "must be 2"),
        ("[streams.Shop]\nsource.dsn = 'x'\n", 1, "streams.Shop", "can't name a stream"),
        ("[streams.shop]\nsource.dsn = 'x'\nsource.tables=['a b']", 3, "streams.shop.source.tables", "not a pattern"),
        ("[streams.shop]\nsource.dsn = 'x'\ntypes.'public.o.t'='int'", 3, 'streams.shop.types."public.o.t"', "is not a type"),
        ("[streams.shop]\nsource.dsn = 'x'\n[streams.shop.log]\nretention_bytes_max='1GiB'\nretention_bytes='2GiB'", 4, "streams.shop.log.retention_bytes_max", "below retention_bytes, 2GiB"),
        ("[streams.shop]\nsource.dsn = 'x'\n[streams.shop.log]\nretention_bytes_max='10%'", 4, "streams.shop.log.retention_bytes_max", "below retention_bytes, 20%"),
        ("[streams.shop]\nsource.dsn = 'x'\n[streams.shop.log]\nretention_bytes='1B'\nretention_bytes_max='many'", 5, "streams.shop.log.retention_bytes_max", "not a size"),
        ("[streams.shop]\nsource.dsn = 'x'\n[streams.shop.log]\nretention_interval='0s'", 4, "streams.shop.log.retention_interval", "longer than nothing"),
        ("[streams.a]\nsource.dsn='x'\nsource.slot='s'\n[streams.b.source]\ndsn='x'\nslot='s'\n", 6, "streams.b.source.slot", "stream a uses"),
        ("[streams.a]\nacks = 'durable(2)'\n[replication]\nnode = 'a'\nnodes = { a = 'grpc://a:1', b = 'grpc://b:1' }\n", 2, "streams.a.acks", "has 1 other node"),
        ("[streams.a]\nacks = 'object'\n", 2, "streams.a.acks", "[replication] names none"),
        ("[replication]\nnode = 'c'\nnodes = { a = 'grpc://a:1' }\n", 1, "replication", "isn't among nodes"),
        ("[replication]\nnode = 'a'\nregions = { 0 = 'grpc://a:1' }\n", 3, "replication.regions", "no region's number"),
        ("[replication]\nobject_store = 'ftp://a'\n", 2, "replication.object_store", "must begin with"),
    ],
)  # fmt: skip
def test_a_mistake_names_file_line_key_and_what_is_allowed(
    tmp_path: Path, text: str, line: int, key: str, says: str
) -> None:
    error = mistake(tmp_path, text)
    assert (error.details["line"], error.details["key"]) == (line, key)
    assert says in error.message
    assert f"millstream.toml:{line}" in error.message


@pytest.mark.parametrize(
    ("dsn", "clashes"),
    [
        ("postgresql://b:other@h/d", True),
        ("postgres://a@h:5432/d?sslmode=require", True),
        ("host=h dbname=d user=b", True),
        ("postgresql://a@h:5433/d", False),
        ("postgresql://a@i/d", False),
        ("service=shop", False),
        ("host=h dbname='d", False),
    ],
)
def test_two_streams_of_one_database_need_two_slots_however_their_dsns_are_written(
    tmp_path: Path, dsn: str, clashes: bool
) -> None:
    """Only the same text was noticed: whichever stream came first took the changes from the other one."""
    text = "[streams.{}.source]\ndsn = {}\nslot = 's'\n"
    file = text.format("x", "'postgresql://a:${SHOP_PASSWORD}@h/d'") + text.format("y", json.dumps(dsn))
    if clashes:
        assert "streams.y.source.slot: stream x uses the slot s" in mistake(tmp_path, file).message
        file = file.replace("slot = 's'", "slot = 't'", 1)
    assert len(load(tmp_path, file).config.streams) == 2


@pytest.mark.parametrize(
    "master",
    ["local", "local[*]", "local[2]", "local[*, 4]", "spark://a:7077,[::1]:7077", "yarn", "k8s://https://h:6443"],
)
def test_a_master_of_a_kind_that_spark_has_is_taken(tmp_path: Path, master: str) -> None:
    assert load(tmp_path, f"[spark]\nmaster = '{master}'\n").config.spark.master == master


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    error = mistake(tmp_path, "[spark]\nmastr = 'x'\n[http]\nlisten = 1\n")
    assert len(error.details["mistakes"]) == 2


def test_a_missing_variable_is_named_with_its_line(tmp_path: Path) -> None:
    error = mistake(tmp_path, GOOD, {})
    assert error.details["line"] == 3
    assert "SHOP_PASSWORD is not set" in error.message


def test_who_asks_no_other_node_needs_no_nodes_token(tmp_path: Path) -> None:
    text = '[replication]\nnode = "b"\nmax_staleness = "10s"\ntoken = "${NODE_TOKEN}"\n'
    assert "replication.token: the environment variable NODE_TOKEN is not set" in mistake(tmp_path, text, {}).message
    loaded = load_config(tmp_path / "millstream.toml", {}, needs_source=False)
    assert loaded.config.replication.max_staleness == "10s"
    with pytest.raises(ConfigError, match=r"millstream\.toml:4: .*NODE_TOKEN is not set"):
        loaded.node_token()
    for environ in ({"NODE_TOKEN": "s"}, {"MILLSTREAM_REPLICATION__TOKEN": "s"}):
        assert load_config(tmp_path / "millstream.toml", environ, needs_source=False).node_token() == "s"


def test_a_mistake_in_the_environment_names_the_variable(tmp_path: Path) -> None:
    error = mistake(tmp_path, GOOD, ENVIRON | {"MILLSTREAM_SPARK__MASTR": "x"})
    assert "env MILLSTREAM_SPARK__MASTR: spark.mastr: unknown key" in error.message
    assert error.hint.startswith("Mend MILLSTREAM_SPARK__MASTR; ")
    both = mistake(tmp_path, "[sparc]\n" + GOOD, ENVIRON | {"MILLSTREAM_SPARK__MASTR": "x"})
    assert all(place in both.hint for place in ("millstream.toml", " and ", "MILLSTREAM_SPARK__MASTR;"))
    error = mistake(tmp_path, GOOD, ENVIRON | {"MILLSTREAM_STREAMS__SHOP__LOG__SHARDS": "many"})
    assert "env MILLSTREAM_STREAMS__SHOP__LOG__SHARDS: streams.shop.log.shards: must be a whole number" in error.message
    for variable, section in (("MILLSTREAM_NOPE__X", "nope"), ("MILLSTREAM_SPARC__MASTER", "sparc")):
        error = mistake(tmp_path, GOOD, ENVIRON | {variable: "x"})
        assert f"env {variable}: {section}: unknown key;" in error.message
        assert "allowed here: streams, spark, http" in error.message
    for variable in ("MILLSTREAM_SPARK", "MILLSTREAM_STREAMS__SHOP__SOURCE__TABLES"):
        others = {"MILLSTREAM_STREAMS__SHOP__LOG__SHARDS": "2", "MILLSTREAM_SPARK__MASTER": "local"}
        error = mistake(tmp_path, GOOD, ENVIRON | others | {variable: "public.*"})
        assert error.message.startswith(f"env {variable}: must be JSON")
        assert error.hint.startswith(f"Mend {variable}; ")


def test_the_keys_of_a_table_in_a_variable_come_from_the_variable(tmp_path: Path) -> None:
    """`config show` called them defaults."""
    environ = {
        "MILLSTREAM_STREAMS__SHOP": '{"region": 2, "log": {"shards": 3}}',
        "MILLSTREAM_STREAMS__SHOP__REGION": "4",
    }
    shown = {path[2:]: (value, origin) for path, value, origin in load(tmp_path, GOOD, ENVIRON | environ).items()}
    assert shown["log", "shards"] == (3, "env MILLSTREAM_STREAMS__SHOP")
    assert shown["region",] == (4, "env MILLSTREAM_STREAMS__SHOP__REGION")
    assert shown["source", "tables"][1] == "millstream.toml:4"


def test_a_variable_that_the_file_names_is_of_no_unknown_section(tmp_path: Path) -> None:
    text = GOOD.replace("${SHOP_PASSWORD}", "${MILLSTREAM_PG__PASSWORD}")
    config = load(tmp_path, text, {"MILLSTREAM_PG__PASSWORD": "s3cret"}).config
    assert config.streams["shop"].source is not None
    assert config.streams["shop"].source.dsn == "postgresql://app:s3cret@localhost/shop"
    error = mistake(tmp_path, text.replace("${MILL", "$${MILL"), {"MILLSTREAM_PG__PASSWORD": "s3cret"})
    assert "env MILLSTREAM_PG__PASSWORD: pg: unknown key;" in error.message


def test_a_mistake_never_shows_the_value_of_a_variable(tmp_path: Path) -> None:
    error = mistake(tmp_path, "[spark]\nmaster = ['${SHOP_PASSWORD}']\n")
    assert "s3cret" not in str(error.as_dict())


@pytest.mark.parametrize(
    ("lake", "said"),
    [
        ("format = 'postgres'", "lake.location: must be a PostgreSQL address"),
        ("location = 'postgresql://u@h/d'", 'lake.location: is a PostgreSQL address: set format = "postgres"'),
        ("format = 'postgres'\nlocation = 'postgresql://u@h/d'\nviews = ['scd2']", "'scd2' isn't a view of 'postgres'"),
        ("views = ['changes']", "'changes' isn't a view of 'delta'"),
        ("schema_prefix = 'a_'", 'schema_prefix: is for format = "postgres" alone'),
        ("format = 'parquet'", "files alone can't be committed together. The data files of 'delta'"),
        ("format = 'iceberg'\ncatalog = {type = 'hive'}", 'catalog.type: must be "sql" or "rest"'),
        ("format = 'iceberg'\ncatalog = {type = 'rest'}", 'catalog.type: is "rest", which needs `uri`'),
        (
            "format = 'iceberg'\ncatalog = {type = 'rest', uri = 'catalog:8181'}",
            "catalog.uri: must begin with https://",
        ),
        ("format = 'iceberg'\n[spark]\nmaster = 'spark://h:7077'", 'catalog.type: can\'t be "sql" with a Spark master'),
        ("catalog = {type = 'sql'}", 'lake.catalog: is for format = "iceberg" alone'),
    ],
)
def test_a_lake_has_what_its_format_has(tmp_path: Path, lake: str, said: str) -> None:
    error = mistake(tmp_path, f"[streams.shop.source]\ndsn = 'x'\n[streams.shop.lake]\n{lake}\n")
    assert said in error.message


def test_iceberg_tables_on_a_cluster_have_a_catalogs_server(tmp_path: Path) -> None:
    catalog = "[streams.shop.lake.catalog]\ntype = 'rest'\nuri = 'http://catalog'\n"
    text = f"[streams.shop.lake]\nformat = 'iceberg'\n{catalog}[spark]\nmaster = 'spark://h:7077'\n"
    assert load(tmp_path, text, ENVIRON).config.streams["shop"].lake.catalog_type == "rest"


def test_secrets_of_a_lakes_catalog_are_put_in_and_never_shown(tmp_path: Path) -> None:
    text = (
        "[streams.shop.source]\ndsn = 'x'\n[streams.shop.lake]\nformat = 'iceberg'\n[streams.shop.lake.catalog]\n"
        "type = 'rest'\nuri = 'https://catalog'\ncredential = 'me:${SHOP_PASSWORD}'\n\"s3.secret-access-key\" = '${SHOP_PASSWORD}'\n"
    )
    loaded = load(tmp_path, text, ENVIRON | {"SHOP_PASSWORD": "s3cret"})
    lake = loaded.config.streams["shop"].lake
    assert (lake.catalog["credential"], lake.lies_in_catalog) == ("me:s3cret", True)
    assert "s3cret" not in str(list(loaded.effective()))


def test_a_password_of_a_destination_is_put_in_and_never_shown(tmp_path: Path) -> None:
    text = (
        "[streams.shop.source]\ndsn = 'x'\n[streams.shop.lake]\nformat = 'postgres'\n"
        "location = 'postgresql://u:${SHOP_PASSWORD}@h/d'\n"
    )
    loaded = load(tmp_path, text, ENVIRON | {"SHOP_PASSWORD": "p@ss/w"})
    assert loaded.config.streams["shop"].lake.location == "postgresql://u:p%40ss%2Fw@h/d"
    shown = {path[-1]: value for path, value, _ in loaded.effective() if path[-2:-1] == ("lake",)}
    assert "ss%2Fw" not in str(shown["location"])
    assert shown["views"] == ["current", "changes"]


def test_a_file_that_is_no_text_or_no_file_is_a_mistake(tmp_path: Path) -> None:
    file = tmp_path / "millstream.toml"
    file.write_bytes(b"a = 1\nb = '\xff'\n")
    with pytest.raises(ConfigError, match=r"millstream\.toml:2: not UTF-8"):
        load_config(file, {})
    file.unlink()
    file.mkdir()
    with pytest.raises(ConfigError, match="can't be read"):
        load_config(file, {})


@given(secret=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12))
def test_a_variable_in_a_dsn_is_plain_text_whatever_its_place(secret: str) -> None:
    from psycopg.conninfo import conninfo_to_dict

    for text in (
        "postgresql://app:${P}@localhost:5433/shop?application_name=x",
        "host=localhost port=5433 user=app password=${P} dbname=shop",
        "host=localhost port=5433 user=app dbname=shop password='${P}'",
    ):
        dsn = interpolate_dsn(text, {"P": secret})
        facts = conninfo_to_dict(dsn)
        assert (facts["password"], facts["user"], facts["dbname"], facts["port"]) == (secret, "app", "shop", "5433")
    assert interpolate_dsn("${P}", {"P": secret}) == secret


@pytest.mark.parametrize(
    ("dsn", "shown"),
    [
        ("postgresql://app:s3cret@h/db", "postgresql://app:***@h/db"),
        ("postgresql://app@h/db?password=s3cret&port=1", "postgresql://app@h/db?password=***&port=1"),
        ("host=h password=s3cret user=a", "host=h password=*** user=a"),
        (r"host=h password = 's3 c\'ret' user=a", "host=h password = *** user=a"),
        ("service=shop", "service=shop"),
        ("${SHOP_DSN}", "${SHOP_DSN}"),
        ("postgresql://[::1]:5432,b:5433/db?sslmode=require", "postgresql://[::1]:5432,b:5433/db?sslmode=require"),
        ("redis://s3cret@h:6379/0", "redis://***@h:6379/0"),
        ("h1:9092,h2:9092", "h1:9092,h2:9092"),
        ("abfss://box@account.dfs.core.windows.net/lake", "abfss://box@account.dfs.core.windows.net/lake"),
        ("/srv/lake of=mine@home", "/srv/lake of=mine@home"),
        ("postgres!//app:s3cret@h/db", "***"),
        ("postgresql://app:s3/cret@h/db", "***"),
        ("host=hpassword=s3cret user=a", "***"),
    ],
)
def test_a_dsn_is_shown_without_its_password(dsn: str, shown: str) -> None:
    assert mask_address(dsn) == shown


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("[streams.shop]\n# [streams.shop.lake]\n\ncompact_files = 3\n", 4, "compact_files belongs to [streams.shop.lake], whose header is still commented out (line 2)"),
        ("# [spark]\nmaster = 'x'\n", 2, "master belongs to [spark], whose header is still commented out (line 1)"),
        ("[spark.conf]\n# [streams.shop.log]    # its log\nretention_age = '1d'\n", 3, "retention_age belongs to [streams.shop.log]"),
        ("[http]\nlisten = '127.0.0.1:1'\n#[flight]\nlisten = '127.0.0.1:2'\n", 4, "listen belongs to [flight], whose header is still commented out (line 3)"),
        ("[streams.shop]\n# [http]\n[streams.shop.log]\nlisten = 'x'\n", 4, "unknown key; allowed here: shards"),
        ("[streams.shop]\n# [http]\nlake = 3\n", 3, "must be a table"),
        # A header names its whole path, and a typo of a key is no name of a table that takes any.
        ("# [spark.conf]\n[streams.shop.lakes]\nfold_interval = '5s'\n", 2, "streams.shop.lakes: unknown key; did you mean lake?"),
        ("[streams.shop.tables.'public.x']\nmerge = {likes = 'pn_counter'}\n", 2, 'belong in [streams.shop.merge."public.x"]'),
        ("[streams.shop.lake]\n# [streams.shop.types]\nfold_intervall = '5s'\n", 3, "did you mean fold_interval?"),
    ],
)  # fmt: skip
def test_a_key_below_a_commented_header_is_told_where_it_belongs(
    tmp_path: Path, text: str, line: int, what: str
) -> None:
    error = mistake(tmp_path, text)
    assert f"millstream.toml:{line}: " in error.message
    assert what in error.message
    assert error.message.count("\n") == 0


def test_a_commented_header_takes_no_key_from_the_section_that_has_it(tmp_path: Path) -> None:
    config = load(tmp_path, "[http]\n# [flight]\nlisten = '127.0.0.1:9'\n[spark.conf]\n# [http]\nother = 'x'\n").config
    assert (config.http.listen, config.spark.conf) == ("127.0.0.1:9", {"other": "x"})


def test_a_new_home_at_a_file_is_refused_as_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "home"):
        with pytest.raises(MillstreamError, match="file: is not a folder") as caught:
            make_home(place, stream="shop", source=None, tables=["public.*"])
        assert caught.value.code == "home_unwritable"


def test_every_key_of_a_new_home_finds_its_section(tmp_path: Path) -> None:
    made = make_home(tmp_path / "home", stream="shop", source="host=h", tables=["public.*"]).file
    lines = made.read_text().split("\n")
    commented = [n for n, one in enumerate(lines) if re.match(r'# ("[^"]+"|[a-z_]+) = ', one)]
    assert len(commented) > 10
    for number in commented:
        text = "\n".join([*lines[:number], lines[number].removeprefix("# "), *lines[number + 1 :]])
        (tmp_path / "millstream.toml").write_text(text)
        header = next(one for one in reversed(lines[:number]) if re.match(r"(# )?\[", one))
        with contextlib.ExitStack() as stack:
            if header.startswith("# "):
                stack.enter_context(
                    pytest.raises(ConfigError, match=re.escape(f"belongs to {header[2:].split(']')[0]}]"))
                )
            load_config(tmp_path / "millstream.toml", {})


def test_a_doubled_dollar_stands_for_itself() -> None:
    assert interpolate("$${X} ${X} $x", {"X": "1"}) == "${X} 1 $x"


def test_quantities_are_what_people_write() -> None:
    assert [duration_s(t) for t in ("500ms", "10s", "5 min", "1.5h", "7d")] == [0.5, 10, 300, 5400, 604800]
    assert [size_bytes(t, whole=1000) for t in ("5", "64MiB", "1kB", "20%")] == [5, 64 << 20, 1000, 200]
    for text in ("20%", "much", "-1", ""):
        with pytest.raises(ValueError, match="size"):
            size_bytes(text)
    with pytest.raises(ValueError, match="duration"):
        duration_s("7")


_KEYS = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "Zs")), min_size=1, max_size=6)
_SCALARS = st.one_of(st.integers(-9, 9), st.booleans(), st.text(max_size=5), st.just("#[]{}=,'\""))


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[ # list\n" + ",\n".join(map(_toml, value)) + "\n]"
    return json.dumps(value)


@given(
    tables=st.dictionaries(
        _KEYS,
        st.dictionaries(_KEYS, st.recursive(_SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(_KEYS, v, max_size=3))),
        max_size=3,
    )
)  # fmt: skip
def test_every_key_is_found_on_its_line(tables: dict[str, dict[str, Any]]) -> None:
    lines: list[str] = []
    expected: dict[tuple[str, ...], int] = {}
    for table, keys in tables.items():
        lines += ["# a comment with = and [", f"[{json.dumps(table)}] # header"]
        expected[table,] = len(lines)
        for key, value in keys.items():
            expected[table, key] = len(lines) + 1
            lines += f"{json.dumps(key)} = {_toml(value)}".split("\n")
    text = "\n".join(lines)
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return  # JSON's escapes are not quite TOML's
    found = key_lines(text)
    assert {path: found[path] for path in expected} == expected
    assert {path for path in found if len(path) <= 2} == set(expected)


def test_keys_in_every_shape_are_found() -> None:
    text = 'a.b = """x\n"""\nc = \'\'\'\n[z]\n\'\'\'\n[[d]]\ne = ""\n[[d]]\ne = { f = 1979-05-27 07:32:00, "g.h" = [1,\n{i = 1}] }\n'
    found = key_lines(text)
    tomllib.loads(text)
    assert found["a", "b"] == 1
    assert found["c",] == 3
    assert found["d", 1, "e"] == 9
    assert found["d", 1, "e", "g.h", 1, "i"] == 10


@pytest.mark.parametrize("key", ['"\\U0001F600"', '"a\tb"', "'a\"b'", '"\\""', '""'])
def test_a_key_is_found_however_toml_writes_it(key: str) -> None:
    """The scanner took a key in quotes for JSON, which has other escapes and no tab."""
    text = f"[streams.shop.keys]\n{key} = ['id']\n"
    (name,) = tomllib.loads(text)["streams"]["shop"]["keys"]
    assert key_lines(text)["streams", "shop", "keys", name] == 2


def test_shards_and_types_are_given_to_tables_by_the_rule_of_names(tmp_path: Path) -> None:
    """Only lower-case names with their schema and without quotes were found; the others were on shard 0, silently."""
    keys = ['public."Big"', "orders", "Public.Clicks"]
    shards = "".join(f"{json.dumps(key)} = {n}\n" for n, key in enumerate(keys, 1))
    types = "".join(f'{json.dumps(key + ".total")} = "decimal(38,9)"\n' for key in keys)
    (tmp_path / "millstream.toml").write_text(
        f"[streams.web.log]\nshards = 4\n[streams.web.shards]\n{shards}[streams.web.types]\n{types}"
        '[streams.web.source]\ndsn = "host=nowhere"\n'
    )
    home = Home(tmp_path)
    config = home.config.streams["web"]
    found = shard_of(config, ShardId(0))
    assert [found(table) for table in ("public.Big", "public.orders", "public.clicks", "public.big")] == [1, 2, 3, 0]
    layout = lake_layout(home, "web", config, StreamId(UUID(int=1)))
    assert set(layout.types) == {"public.Big.total", "public.orders.total", "public.clicks.total"}
    assert capture_config(home, "web", config).lake_types == layout.types


def test_a_shard_of_what_is_no_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "millstream.toml").write_text('[streams.web.shards]\n"public.a b" = 0\n')
    with pytest.raises(ConfigError, match="is not the name of a table"):
        load_config(tmp_path / "millstream.toml")


@pytest.mark.parametrize(
    ("stream", "key", "value", "fits"),
    [
        ("s", "publication", "ü" * 27, True),
        ("s", "publication", "ü" * 28, False),
        ("s" * 44, "tables", ["public.*"], True),
        ("s" * 45, "tables", ["public.*"], False),
    ],
)
def test_a_name_that_postgresql_would_cut_is_refused(
    tmp_path: Path, stream: str, key: str, value: object, fits: bool
) -> None:
    """Both publications were one, and an application's updates of tables without a key failed."""
    (tmp_path / "millstream.toml").write_text(
        f"[streams.{stream}.source]\ndsn = 'host=127.0.0.1'\n{key} = {json.dumps(value, ensure_ascii=False)}\n"
    )
    with contextlib.nullcontext() if fits else pytest.raises(ConfigError, match="longer than the 55 bytes"):
        load_config(tmp_path / "millstream.toml")

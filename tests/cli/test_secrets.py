"""No output of a command shows a password of an address, however the address is written or mistyped."""

from __future__ import annotations

import contextlib
import json
import string
import tomllib
from pathlib import Path
from urllib.parse import quote

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from psycopg.pq import Conninfo
from tests.cli.in_process import command
from tests.seeds import examples

from millstream.administration.initialize import make_home
from millstream.cli.main import cli
from millstream.config.interpolation import interpolate_dsn
from millstream.errors import UsageError
from millstream.libpq import describe_parameters, parse_address
from millstream.model.addresses import MASK, mask_address, mask_option

# Six characters or more, with a letter: `app:123` in front of a host can't be told from a host and its port.
# Only letters that hosts, users and keywords don't have, so that a match in the output is the password.
PASSWORDS = st.text("QXZJ0987" + string.punctuation, min_size=6, max_size=16).filter(
    lambda text: set("QXZJ") & set(text) and "${" not in text and "$$" not in text
)


def quoted(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def escaped(value: str) -> str:
    return "".join(f"\\{one}" if one in "\\' " else one for one in value)


URLS = (
    "{scheme}://app:{encoded}@127.0.0.1:1/db",
    "{scheme}://:{encoded}@127.0.0.1:1",
    "{scheme}://app:{encoded}@127.0.0.1:1,[::1]:2/0?connect_timeout=3",
    "{scheme}://127.0.0.1:1/db?user=app&password={encoded}",
    "{scheme}:///db?host=127.0.0.1&%70assword={encoded}&port=1",
    "{scheme}://app@127.0.0.1:1/db?sslpassword={encoded}",
)
KEYWORDS = (
    "host=127.0.0.1 port=1 user=app password={quoted} dbname=db",
    "host = 127.0.0.1 password = {quoted}",
    "sslpassword={escaped} host=127.0.0.1 port=1",
    "PASSWORD={quoted} host=127.0.0.1 port=1",
)


@st.composite
def addresses(draw: st.DrawFn, forms: tuple[str, ...] = URLS + KEYWORDS) -> tuple[str, str]:
    """Draw a password and an address with it: well-formed, or with a wrong character before or behind the password."""
    password = draw(PASSWORDS)
    form = draw(st.sampled_from(forms))
    facts = {
        "scheme": draw(st.sampled_from(["postgresql", "postgres", "redis", "https", "s3"])),
        "encoded": draw(st.sampled_from([quote(password, safe=""), quote(password, safe="!$&'()*+,;=:"), password])),
        "quoted": draw(st.sampled_from([quoted(password), password])),
        "escaped": draw(st.sampled_from([escaped(password), password])),
    }
    text = form.format(**facts)
    secret = next(facts[name] for name in ("encoded", "quoted", "escaped") if "{" + name + "}" in form)
    start = text.index(secret)
    # A missing `:` in `app:PASSWORD@` makes a user of both; no parser can tell it from a user.
    places = [
        n for n in range(len(text)) if not start <= n < start + len(secret) and not (n == start - 1 and text[n] == ":")
    ]
    at = draw(st.one_of(st.none(), st.sampled_from(places)))
    if at is not None:
        other = draw(st.sampled_from(["", "!", " ", "/", ":", "@", "?", "#", "=", "x"]))
        keeps = draw(st.booleans()) and at != start - 1
        text = text[:at] + other + (text[at] if keeps else "") + text[at + 1 :]
    return password, text


def assert_unsaid(password: str, said: str) -> None:
    forms = {
        password,
        quote(password, safe=""),
        quote(password, safe="!$&'()*+,;=:"),
        quoted(password)[1:-1],
        escaped(password),
    }
    forms |= {json.dumps(one, ensure_ascii=False)[1:-1] for one in forms} | {repr(one)[1:-1] for one in forms}
    assert not [one for one in forms if one in said], said


@given(addresses())
@example(("PASSWORD", "postgres!//app:PASSWORD@host/db"))
@example(("PASS/WORD", "postgresql://app:PASS/WORD@host/db"))
@example(("12/PASSWORD", "postgresql://app:12/PASSWORD@host/db"))
@example(("PASSWORD", "s3://bucket/dbuser=app&password=PASSWORD"))
@example(("PASSWORD", "postgresql://127.0.0.1:1/dbuser=app&password=PASSWORD"))
@example(("PASSWORD", "host=hpassword=PASSWORD user=app"))
@example(("PASS WORD", "host=h password=PASS WORD user=app"))
@example(("00000J", "/ost=127.0.0.1 port=1 user=app password='00000J' dbname=db"))
@settings(max_examples=examples(600), deadline=None)
def test_an_address_is_shown_without_its_password(drawn: tuple[str, str]) -> None:
    password, text = drawn
    assert_unsaid(password, mask_address(text))
    error: BaseException | None = None
    try:
        said = describe_parameters(parse_address(text))
    except ValueError as raised:
        error, said = raised, str(raised)
    # libpq's own error quotes the address, and a traceback would show it.
    assert error is None or error.__cause__ is None
    assert_unsaid(password, said)


@given(PASSWORDS)
def test_options_of_others_are_shown_without_secrets(password: str) -> None:
    for key, value in (
        ("aws_secret_access_key", password),
        ("fs.azure.sas.box.account.dfs.core.windows.net", password),
        ("sasl.password", password),
        ("sasl.jaas.config", f'Login required username="app" password="{password}";'),
        ("spark.driver.extraJavaOptions", f"-Xmx1g -Djavax.net.ssl.trustStorePassword={password}"),
        ("spark.hadoop.javax.jdo.option.ConnectionURL", f"jdbc:postgresql://h/db?user=app&password={password}"),
        ("schema.registry.basic.auth.user.info", f"app:{password}"),
        ("endpoint", f"https://app:{password}@127.0.0.1:1"),
    ):
        assert_unsaid(password, mask_option(key, value))
    assert mask_option("sasl.mechanism", "SCRAM-SHA-512") == "SCRAM-SHA-512"
    assert mask_option("spark.driver.memory", "2g") == "2g"
    assert mask_option("endpoint_url", "http://127.0.0.1:9000") == "http://127.0.0.1:9000"


CONFIG = """\
[streams.shop.source]
dsn = {dsn}
[streams.web.routing]
rules = [{{ table = "public.bots", to = ["ring", "far"] }}, {{ where = "kind = 'x'", to = "devnull" }}]
hash_ring = {{}}
[streams.web.routing.sinks.far]
kind = {kind}
location = {location}
[streams.land.lake]
format = {format}
location = {lake}
[streams.kept.buffer]
role = "writes"
kind = {kind}
location = {location}
[catalog]
url = {catalog}
[replication]
node = "a"
nodes = {{ a = {node} }}
object_store = {store}
"""


PLAIN = {
    "dsn": "service=none",
    "location": "h:9092",
    "lake": "lake",
    "catalog": "data/catalog.db",
    "node": "grpc://127.0.0.1:1",
    "store": "file:///dev/null/store",
    "kind": "kafka",
    "format": "delta",
}


def write_config(folder: Path, facts: dict[str, str]) -> None:
    config = CONFIG.format(**{name: json.dumps(value, ensure_ascii=False) for name, value in facts.items()})
    (folder / "millstream.toml").write_text(config)


def test_the_configuration_that_passwords_are_put_into_is_right(tmp_path: Path) -> None:
    write_config(tmp_path, PLAIN)
    done = command("--home", str(tmp_path), "config", "show")
    assert done.returncode == 0, done.stderr.decode()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home for all examples: the first `doctor` compiles decoders into it."""
    return tmp_path_factory.mktemp("home")


@given(data=st.data(), where=st.sampled_from(["dsn", "location", "lake", "catalog", "node", "store"]))
@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_command_prints_a_password(home: Path, data: st.DataObject, where: str) -> None:
    password, address = data.draw(addresses())
    facts = PLAIN | {where: address.replace("${", "$${")}
    if where == "location":
        facts["kind"] = data.draw(st.sampled_from(["kafka", "redis", "log"]))
    elif where == "lake":
        facts["format"] = data.draw(st.sampled_from(["delta", "postgres"]))
    write_config(home, facts)
    for words in (
        ["config", "show"],
        ["--debug", "config", "show", "--json"],
        ["--debug", "status"],
        ["--debug", "doctor"],
    ):
        done = command("--home", str(home), *words)
        assert_unsaid(password, done.stdout.decode() + done.stderr.decode())


def test_config_show_prints_routing_rules(tmp_path: Path) -> None:
    text = (
        '[[streams.web.routing.rules]]\ntable = "public.bots"\nto = ["ring", "far"]\n'
        '[[streams.web.routing.rules]]\nwhere = "kind = \'x\'"\nto = "devnull"\n[streams.web.routing.hash_ring]\n'
        '[streams.web.routing.sinks.far]\nkind = "kafka"\nlocation = "h:9092"\n'
    )
    (tmp_path / "millstream.toml").write_text(text)
    done = command("--home", str(tmp_path), "config", "show")
    assert done.returncode == 0, done.stderr.decode()
    rules = tomllib.loads(done.stdout.decode())["streams"]["web"]["routing"]["rules"]
    assert [rule["to"] for rule in rules] == [["ring", "far"], "devnull"]
    assert "# millstream.toml:3" in done.stdout.decode()
    entries = json.loads(command("--home", str(tmp_path), "config", "show", "--json").stdout)
    assert {
        "key": "streams.web.routing.rules[1].where",
        "value": "kind = 'x'",
        "origin": "millstream.toml:5",
    } in entries


@pytest.mark.parametrize(
    ("kind", "location"),
    [("kafka", "app:PASSWORD@h:9092"), ("redis", "redis://:PASS/WORD@h:6379"), ("redis", "redis!//:PASSWORD@h:6379"), ("log", "redis://:PASSWORD@h")],
)  # fmt: skip
def test_an_address_with_a_slip_is_refused_by_its_place(tmp_path: Path, kind: str, location: str) -> None:
    config = f'[streams.web.buffer]\nrole = "writes"\nkind = "{kind}"\nlocation = "{location}"\n'
    (tmp_path / "millstream.toml").write_text(config)
    done = command("--home", str(tmp_path), "config", "show")
    assert done.returncode == 2
    assert "millstream.toml:4: streams.web.buffer.location: isn't a" in done.stderr.decode()
    assert "WORD" not in done.stderr.decode()


def test_buffers_say_nothing_of_an_address_that_they_can_not_read() -> None:
    from millstream.buffers.kafka import KafkaBuffer, KafkaOptions
    from millstream.buffers.redis_server import connect
    from millstream.errors import BufferRefused

    with (
        pytest.raises(BufferRefused) as refused,
        contextlib.closing(KafkaBuffer(KafkaOptions("app:PASSWORD@h:1", "t"))),
    ):
        pass
    assert "PASSWORD" not in str(refused.value)
    for url in ("redis://app:12/PASSWORD@h", "redis://h:PASSWORD", "PASSWORD"):
        with pytest.raises(BufferRefused) as refused:
            connect(url, "web", timeout_s=1)
        assert "PASSWORD" not in str(refused.value) + repr(refused.value.__cause__)


def test_an_object_store_is_never_given_keys_in_its_address() -> None:
    from millstream.replication.object_store.store_client import open_objects

    for url in ("s3://KEY:PASSWORD@bucket/x", "s3!//KEY:PASSWORD@bucket", "s3://bucket/x?secret=PASSWORD"):
        with pytest.raises(UsageError) as refused:
            open_objects(url)
        assert "PASSWORD" not in str(refused.value)
    assert mask_address("s3://bucket/some/prefix") != MASK


@given(addresses())
@example(("p@ss/word:QX", "postgresql://app:p@ss/word:QX@127.0.0.1:1/db"))
@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_init_writes_no_part_of_a_password(tmp_path: Path, drawn: tuple[str, str]) -> None:
    password, address = drawn
    home = tmp_path / "home"
    try:
        made = make_home(home, stream="s", source=address, tables=["public.*"])
    except UsageError as error:
        assert_unsaid(password, f"{error} {error.hint}")
        return
    written = made.file.read_text()
    made.file.unlink()
    assert_unsaid(password, written)
    # With the variable set, the configuration's address is the one that was drawn.
    loaded = tomllib.loads(written)["streams"]["s"]["source"]["dsn"]
    try:
        expected = parse_address(address)
    except ValueError:
        return
    meant = parse_address(interpolate_dsn(loaded, made.environ))
    assert {key: value for key, value in meant.items() if value} == {
        key: value for key, value in expected.items() if value
    }


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://app:p@ss@127.0.0.1:1/db",
        "postgresql://app:p/ss@127.0.0.1:1/db",
        "postgresql://app:1/ss@127.0.0.1:1/db",
        "postgres!//app:p:ss@127.0.0.1:1/db",
        "host=127.0.0.1 password=p ss",
        "host=127.0.0.1 passwort=p:ss",
        "postgresql://app:p%ss@127.0.0.1:1/db",
        "postgresql://app:p%40ss@127.0.0.1:1/db?password=other",
        "host=127.0.0.1 sslpassword=p:ss",
    ],
)
def test_init_refuses_an_address_whose_password_it_can_not_tell(tmp_path: Path, dsn: str) -> None:
    done = command("init", str(tmp_path / "home"), "--stream", "s", "--source", dsn)
    assert done.returncode == 2, done.stderr.decode()
    assert "hint:" in done.stderr.decode()
    assert "ss@" not in done.stderr.decode()
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("dsn", "written"),
    [
        ("postgresql://app@127.0.0.1:1/db", "postgresql://app:${MY_SECRET}@127.0.0.1:1/db"),
        ("postgresql://127.0.0.1:1/db?user=app", "postgresql://:${MY_SECRET}@127.0.0.1:1/db?user=app"),
        ("host=127.0.0.1 port=1 dbname=db user=app", "host=127.0.0.1 port=1 dbname=db user=app password=${MY_SECRET}"),
    ],
)
def test_init_takes_the_password_from_a_variable(tmp_path: Path, dsn: str, written: str) -> None:
    words = ("init", str(tmp_path), "--stream", "s", "--source", dsn, "--password-env", "MY_SECRET")
    done = command(*words, environ={"MY_SECRET": "p@s/s:'x"})
    assert done.returncode == 0, done.stderr.decode()
    assert "MY_SECRET is set already" in done.stderr.decode()
    (tmp_path / "unset").mkdir()
    unset = command("init", str(tmp_path / "unset"), *words[2:])
    assert "export MY_SECRET=" in unset.stderr.decode()
    dsn = tomllib.loads((tmp_path / "millstream.toml").read_text())["streams"]["s"]["source"]["dsn"]
    assert dsn == written
    said = parse_address(interpolate_dsn(dsn, {"MY_SECRET": "p@s/s:'x"}))
    assert (said["password"], said["user"], said["dbname"]) == ("p@s/s:'x", "app", "db")
    for wrong in (("--password-env", "MY-SECRET"), ("--password-env", "X", "--source", "postgresql://a:b@h/d")):
        done = command("init", str(tmp_path / "other"), "--stream", "s", "--source", dsn.split(":${")[0], *wrong)
        assert done.returncode == 2


def test_every_keyword_of_libpq_is_known() -> None:
    keywords = [option.keyword.decode() for option in Conninfo.get_defaults()]
    assert "password" in keywords
    assert [word for word in keywords if mask_address(f"{word}=1") not in {f"{word}=1", f"{word}={MASK}"}] == []


def test_init_checks_the_columns_with_the_password_that_it_got(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It read the file without the password, and reported a variable that the caller never heard of."""
    monkeypatch.delenv("SHOP_PASSWORD", raising=False)
    address = "postgresql://app:QXZJ0987@127.0.0.1:1/shop"
    done = CliRunner().invoke(cli, ["init", str(tmp_path / "home"), "--stream", "shop", "--source", address])
    assert done.exit_code == 0, done.output
    assert "SHOP_PASSWORD is needed:  export SHOP_PASSWORD=…" in done.output
    assert "The source isn't ready: " in done.output, "it was asked"
    assert "not set" not in done.output
    assert "QXZJ0987" not in done.output

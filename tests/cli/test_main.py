from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import resource
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.app.homes import make_home
from tests.cli.in_process import command

from millstream.administration import initialize
from millstream.cli.main import main
from millstream.cli.wal_export_import import _named
from millstream.private_files import open_private
from millstream.testing.pytest_plugin import Database
from millstream.wal.files import as_told

HEAVY = (
    "alembic", "deltalake", "duckdb", "fastapi", "numba", "numpy", "pandas", "prometheus_client", "psycopg", "pyarrow", "pydantic",
    "pyspark", "rich", "sqlalchemy", "structlog", "uvloop",
)  # fmt: skip


def millstream(
    *arguments: str, environ: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "millstream.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=cwd,
        env={**os.environ, **(environ or {})},
        stdin=subprocess.DEVNULL,
    )


def here(
    *arguments: str, environ: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run in this process: for calls that start no lasting process even if they are accepted wrongly."""
    done = command(*arguments, environ=environ, cwd=cwd)
    return subprocess.CompletedProcess(arguments, done.returncode, done.stdout.decode(), done.stderr.decode())


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from millstream.cli.main import cli\n"
        "for name in (None, *cli.list_commands(None)):\n"
        "    try: cli.main([name, '--help'] if name else ['--help'])\n"
        "    except SystemExit: pass\n"
        f"print(sorted(set(sys.modules) & set({HEAVY!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


EARLY_SIGNAL = """
import importlib, os, signal, sys
from millstream.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
find = importlib.import_module
def import_module(name, package=None):
    os.kill(os.getpid(), int(os.environ["NUMBER"]))
    return find(name, package)
importlib.import_module = import_module
main(sys.argv[1:])
"""
"""Starts a command whose process gets a signal when it begins to import the command."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--home", "wal", "run"], 0),
        (["--home=x", "serve", "--log-format", "json"], 0),
        (["capture", "run"], 0),
        (["pipeline", "run", "--until-caught-up"], 130),
        (["tables", "copy", "run"], None),
    ],
)
def test_an_early_signal_ends_what_runs_until_a_signal(
    words: list[str], code: int | None, number: signal.Signals
) -> None:
    """Such a process died of SIGTERM in its first second, in which it imports."""
    environ = {**os.environ, "NUMBER": str(int(number))}
    ended = subprocess.run([sys.executable, "-c", EARLY_SIGNAL, *words], capture_output=True, text=True, env=environ)
    killed = 130 if number is signal.SIGINT else -signal.SIGTERM
    assert ended.returncode == (killed if code is None else code), ended.stderr
    assert ended.stderr == ("interrupted\n" if code is None and number is signal.SIGINT else "")


def test_a_follower_begins_without_what_it_does_not_need() -> None:
    code = (
        "import gc, sys\n"
        "from millstream.cli.startup import importing, without_pandas\n"
        "with without_pandas(), importing():\n"
        "    import millstream.nodes.follower_process, millstream.config.model, pyarrow as pa\n"
        "    exec('assert pa.array([1]).to_pylist() == [1]', {'__name__': 'millstream.wal', 'pa': pa})\n"
        "assert gc.isenabled() and gc.get_freeze_count()\n"
        "print(sorted(set(sys.modules) & {'alembic', 'duckdb', 'fastapi', 'numba', 'obstore', 'pandas', 'sqlalchemy'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_pandas_is_left_out_of_commands_and_not_of_other_packages(tmp_path: Path) -> None:
    (tmp_path / "pandas.py").write_text("found = True\n__version__ = '2.2.0'\n")
    (tmp_path / "their_sink.py").write_text("import pandas\n")
    code = (
        "import sys\n"
        "import pyarrow as pa\n"
        "from millstream.cli.startup import without_pandas\n"
        "with without_pandas():\n"
        "    exec(compile('import pyarrow as pa\\npa.array([1])', 'x', 'exec'), {'__name__': 'millstream.wal'})\n"
        "    assert 'pandas' not in sys.modules\n"
        "    import their_sink\n"
        "    assert their_sink.pandas.found\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))}
    subprocess.run([sys.executable, "-c", code], check=True, env=environ)


def cpu_s_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_answers_at_once() -> None:
    times = []
    for _ in range(3):
        start = cpu_s_of_children()
        assert millstream("--help").returncode == 0
        times.append(cpu_s_of_children() - start)
    # A loaded machine must not fail the suite, so other processes' load isn't counted. `make bench` reports the
    # figure of 0.3 s.
    assert min(times) < 1.0


def test_import_millstream_imports_nothing() -> None:
    code = f"import sys, millstream; print(sorted(set(sys.modules) & set({HEAVY!r})), millstream.open.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] open\n"


@pytest.mark.parametrize("arguments", [["nothing"], ["status", "--nothing"], ["query", "--nothing"]])
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    done = here(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage" in done.stderr


def test_a_node_and_a_store_that_arent_configured_are_wrong_usage(tmp_path: Path) -> None:
    nodes = 'node = "a"\n[replication.nodes]\na = "grpc://127.0.0.1:1"\nb = "grpc://127.0.0.1:2"\n'
    (tmp_path / "millstream.toml").write_text(f"[streams.shop]\n[replication]\n{nodes}")
    unknown = millstream("--home", str(tmp_path), "follow", "x", "--only-note")
    assert (unknown.returncode, "unknown_node" in unknown.stderr) == (2, True), unknown.stderr
    storeless = millstream("--home", str(tmp_path), "scrub")
    assert (storeless.returncode, "None" in storeless.stderr) == (2, False), storeless.stderr
    assert "names no object store" in storeless.stderr


def test_an_error_is_a_code_and_a_hint_and_no_traceback(tmp_path: Path) -> None:
    done = millstream("--home", str(tmp_path / "none"), "status")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "error[home_not_found]" in done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Traceback" in millstream("--debug", "--home", str(tmp_path / "none"), "status").stderr


def test_a_missing_extra_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "millstream.toml").write_text("")
    code = (
        "import sys; sys.modules['pydantic'] = None\n"
        "from millstream.cli.main import main\n"
        f"main(['--home', {str(tmp_path)!r}, 'config', 'show'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "error[missing_extra]" in done.stderr
    assert "millstream[run]" in done.stderr


def test_init_writes_a_configuration_that_holds_no_password_and_never_overwrites(tmp_path: Path) -> None:
    home = tmp_path / "shop"
    dsn = "postgresql://app:s%40cret@127.0.0.1:1/shop"
    words = [
        "init",
        str(home),
        "--stream",
        "shop",
        "--source",
        dsn,
        "--tables",
        "public.*",
        "--tables",
        "!public.audit_*",
    ]
    done = here(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "export SHOP_PASSWORD" in done.stderr
    text = (home / "millstream.toml").read_text()
    assert "s%40cret" not in text + done.stderr
    assert "s@cret" not in text + done.stderr
    assert text.count("millstream config show") == 1
    shown = here("--home", str(home), "config", "show", "--json", environ={"SHOP_PASSWORD": "s@cret"})
    values = {entry["key"]: entry for entry in json.loads(shown.stdout)}
    assert values["streams.shop.source.dsn"]["value"] == "postgresql://app:***@127.0.0.1:1/shop"
    assert values["streams.shop.source.tables"]["value"] == ["public.*", "!public.audit_*"]
    assert values["streams.shop.source.slot"]["origin"] == "default"
    assert "s@cret" not in shown.stdout
    again = here(*words)
    assert again.returncode == 2
    assert (home / "millstream.toml").read_text() == text


def test_the_commands_that_init_names_act_on_its_home(tmp_path: Path) -> None:
    """A folder with a blank wasn't quoted, and MILLSTREAM_HOME named another home."""
    words = ("--stream", "shop")
    assert "millstream --home 'a home' doctor" in here("init", "a home", *words, cwd=tmp_path).stderr
    (tmp_path / "b").mkdir()
    (tmp_path / "c").mkdir()
    assert "Next:  millstream doctor" in here("init", *words, cwd=tmp_path / "b").stderr
    other = here("init", *words, cwd=tmp_path / "c", environ={"MILLSTREAM_HOME": str(tmp_path / "b")})
    assert f"millstream --home {tmp_path / 'c'} doctor" in other.stderr


def test_init_on_a_full_disk_says_so_and_leaves_no_part_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It told to get the right to write; and its next try found the part of a file, and refused."""

    def open_on_a_full_disk(path: str, flags: int) -> int:
        os.close(open_private(path, flags))
        return os.open("/dev/full", os.O_WRONLY)

    words = ("init", str(tmp_path / "home"), "--stream", "shop")
    monkeypatch.setattr(initialize, "open_private", open_on_a_full_disk)
    done = here(*words)
    assert (done.returncode, "error[disk_full]" in done.stderr) == (1, True)
    assert f"{tmp_path}/home/millstream.toml: No space left on device" in done.stderr
    monkeypatch.undo()
    assert here(*words).returncode == 0


def test_an_export_names_its_output_in_an_error_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space") as caught, _named(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert as_told(caught.value).message == f"{tmp_path}: No space left on device"


def test_init_writes_the_lakes_place_and_refuses_one_with_a_key(tmp_path: Path) -> None:
    def shown(folder: Path, key: str) -> object:
        done = here("--home", str(folder), "config", "show", "--json")
        assert done.returncode == 0, done.stderr
        return next(entry["value"] for entry in json.loads(done.stdout) if entry["key"] == key)

    for number, place in enumerate(("s3://bucket/lake", "../elsewhere", 'a "quoted" folder')):
        folder = tmp_path / str(number)
        done = here("init", str(folder), "--stream", "shop", "--lake", "delta", "--location", place)
        assert done.returncode == 0, done.stderr
        assert shown(folder, "streams.shop.lake.format") == "delta"
        assert shown(folder, "streams.shop.lake.location") == place
        assert ("storage_options]" in (folder / "millstream.toml").read_text()) == (number == 0)
    refused = here("init", str(tmp_path / "no"), "--stream", "shop", "--location", "s3://key:s3cr3t@bucket/lake")
    assert refused.returncode == 2
    assert "storage_options" in refused.stderr
    assert "s3cr3t" not in refused.stderr
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("dsn", "written", "secret"),
    [
        ("host=h password='it''s' dbname=d", None, None),
        (r"host=h password='s p\'c' dbname=d", "host=h password=${S_PASSWORD} dbname=d", "s p'c"),
        ("postgresql://a@h/d?password=x%26y&connect_timeout=3", "postgresql://a:${S_PASSWORD}@h/d?connect_timeout=3", "x&y"),
        ("postgresql://a:${MINE}@h/d", "postgresql://a:${MINE}@h/d", None),
        ("service=shop", "service=shop", None),
    ],
)  # fmt: skip
def test_a_password_in_a_dsn_becomes_a_variable(dsn: str, written: str | None, secret: str | None) -> None:
    from millstream.administration.initialize import take_password

    if written is not None:
        assert take_password(dsn, "S_PASSWORD") == (written, secret)


def test_init_tells_of_a_source_that_does_not_answer_in_a_sentence(tmp_path: Path) -> None:
    done = here("init", str(tmp_path), "--stream", "shop", "--source", "host=127.0.0.1 port=1 dbname=x")
    assert done.returncode == 0, done.stderr
    assert "accepting TCP/IP connections?\n" in done.stderr
    assert f"Next:  millstream --home {tmp_path} doctor" in done.stderr


def test_init_lists_generated_columns(tmp_path: Path, postgres: Database) -> None:
    with postgres.connect() as connection:
        kind = "VIRTUAL" if connection.info.server_version >= 180000 else "STORED"
        connection.execute(f"CREATE TABLE made (id int PRIMARY KEY, a int, b int GENERATED ALWAYS AS (a * 2) {kind})")
    done = here("init", str(tmp_path), "--stream", "shop", "--source", postgres.dsn)
    assert done.returncode == 0, done.stderr
    assert "  public.made: b is generated and won't be captured" in done.stderr.splitlines()


def test_config_show_names_the_origin_of_every_value(tmp_path: Path) -> None:
    (tmp_path / "millstream.toml").write_text('[streams.shop.source]\ndsn = "host=x password=pw"\n')
    done = here("config", "show", environ={"MILLSTREAM_HTTP__LISTEN": "127.0.0.1:1"}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert 'dsn = "host=x password=***"' in done.stdout
    assert "# millstream.toml:2" in done.stdout
    assert "# env MILLSTREAM_HTTP__LISTEN" in done.stdout
    assert 'retention_age = "7d"' in done.stdout
    assert "# default" in done.stdout


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["run", "shop"], "millstream --home shop run"),
        (["run", "web"], "Leave out web, or name a home before the command: millstream --home web run"),
        (["serve", "shop"], "millstream --home shop serve"),
        (["config", "show", "shop"], "millstream --home shop config show"),
        (["capture", "run", "shop"], "millstream --home shop capture run"),
        (["slot", "drop", "web"], "millstream slot drop --stream web"),
        (["slot", "drop", "shop"], "millstream --home shop slot drop"),
        (["--home", "shop", "run", "web"], "Leave out web: run works on the whole home shop."),
        (["wal", "ls", "--home", "shop"], "Put --home before the command: millstream --home DIR wal ls"),
        (["status", "--debug"], "Put --debug before the command: millstream --debug status"),
        (["--home", "shop", "slot", "drop", "web"], "millstream --home shop slot drop --stream web"),
    ],
)
def test_a_home_or_a_stream_behind_a_command_is_told_how_to_name_it(
    tmp_path: Path, words: list[str], hint: str
) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "millstream.toml").write_text("[streams.web]\n")
    done = here(*words, cwd=tmp_path)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("  hint: ")
    assert last.endswith(hint)


def test_a_word_that_can_name_no_stream_is_not_taken_for_one(tmp_path: Path) -> None:
    make_home(tmp_path / "web", "[streams.web]\n")
    done = here("--home", "web", "wal", "export", "rows.csv", cwd=tmp_path)
    assert done.returncode == 2
    assert "unexpected extra argument (rows.csv)" in done.stderr
    assert "--stream" not in done.stderr


def test_a_hint_names_the_home_that_the_command_named(tmp_path: Path) -> None:
    """A copied hint acted on another home: the one of the shell's folder."""
    home = make_home(tmp_path / "a home", "[streams.web]\n")
    words = ("consumer", "show", "nosuch")
    assert ": `millstream consumer ls`" in here(*words, cwd=home).stderr
    assert f": `millstream --home '{home}' consumer ls`" in here("--home", str(home), *words).stderr
    assert ": `millstream consumer ls`" in here(*words, cwd=home).stderr


def test_a_file_that_is_named_as_a_home_is_called_a_file(tmp_path: Path) -> None:
    file = tmp_path / "millstream.toml"
    file.write_text("[streams.web]\n")
    done = here("--home", str(file), "status")
    assert done.returncode == 2
    assert f"{file} (--home) is a file, not a home" in done.stderr
    assert f"hint: Name the folder that has a millstream.toml in it: {tmp_path}." in done.stderr
    assert "isn't there" in here("--home", str(tmp_path / "none"), "status").stderr
    assert "is a file, not a home" in here("status", environ={"MILLSTREAM_HOME": str(file)}).stderr


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[streams\n", "error[config]: millstream.toml:1"),
        ("[spark]\nmastr = 1\n", "millstream.toml:2: spark.mastr: unknown key"),
        ("[streams.s]\nsource.dsn='${NOT_SET_ANYWHERE}'\n", "NOT_SET_ANYWHERE is not set"),
        ("[streams.s]\nsource.dsn='x'\nlake.format='orc'\n", "millstream.toml:3: streams.s.lake.format: must be"),
        ("[streams.s.consumers.hook.webhook]\nurl='${NOT_SET_ANYWHERE}'\n", "NOT_SET_ANYWHERE is not set"),
        ("", "names no stream"),
    ],
)
def test_run_refuses_a_configuration_that_is_wrong(tmp_path: Path, text: str, code: str) -> None:
    (tmp_path / "millstream.toml").write_text(text)
    done = millstream("--home", str(tmp_path), "run")
    assert done.returncode == 2
    assert code in done.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("words", [("capture", "run"), ("pipeline", "run"), ("append", "orders"), ("wal", "verify")])
def test_a_home_that_names_no_stream_says_what_to_write(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Regression: capture and the pipeline ran without a word; the others said that `run` would make streams appear."""
    (tmp_path / "millstream.toml").write_text("")
    done = here("--home", str(tmp_path), *words)
    assert done.returncode == 2
    assert f"{tmp_path}/millstream.toml names no stream" in done.stderr
    assert "hint: Add `[streams.NAME]` to it" in done.stderr


def test_what_delivers_nothing_needs_no_variable_of_a_consumer(tmp_path: Path) -> None:
    hook = "[streams.s.consumers.hook.webhook]\nurl='${NOT_SET_ANYWHERE}'\n"
    (tmp_path / "millstream.toml").write_text(f"[streams.s]\nsource.dsn='host={tmp_path} port=1'\n{hook}")
    for words in (("capture", "run", "--until-caught-up"), ("diff",), ("slot", "drop", "--yes")):
        done = here("--home", str(tmp_path), *words)
        assert "NOT_SET_ANYWHERE" not in done.stderr
        assert done.returncode == 1
    assert "NOT_SET_ANYWHERE is not set" in here("--home", str(tmp_path), "doctor").stdout


@pytest.mark.sampled
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ('[streams.s.tables."public.users"]\nexclude = ["nothing"]', "unknown_column"),
        ('[streams.s.tables."public.users"]\nredact = ["id"]', "key_not_excludable"),
        ('[streams.s.tables."public.others"]\nexclude = ["note"]', "unknown_table"),
    ],
)
def test_run_refuses_what_the_source_shows_to_be_wrong(
    tmp_path: Path, postgres: Database, rule: str, code: str
) -> None:
    with postgres.connect() as source:
        source.execute("CREATE TABLE users (id int PRIMARY KEY, note text)")
    (tmp_path / "millstream.toml").write_text(
        f"[streams.s.source]\ndsn = {json.dumps(postgres.dsn)}\ntables = ['public.users']\n{rule}\n"
    )
    findings = json.loads(here("--home", str(tmp_path), "doctor", "--json").stdout)["findings"]
    assert code in {found["code"] for found in findings if found["blocks"] == "source"}
    done = millstream("--home", str(tmp_path), "run", "--until-caught-up")
    assert (done.returncode, f"[{code}]" in done.stderr) == (2, True), done.stderr
    with postgres.connect() as source:
        assert source.execute(
            "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
        ).fetchone() == (0,)


def test_a_home_of_a_newer_format_is_refused_by_every_command(tmp_path: Path) -> None:
    (tmp_path / "millstream.toml").write_text("[streams.s]\nsource.dsn='x'\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "home.json").write_text('{"format": 99}')
    for words in (["status"], ["run"], ["wal", "cat"], ["tables"]):
        done = (millstream if words == ["run"] else here)("--home", str(tmp_path), *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert "error[home_too_new]" in done.stderr


@pytest.mark.long
def test_two_runs_on_one_home_are_refused(tmp_path: Path) -> None:
    from millstream.home.home import Home
    from millstream.processes.role_locks import RoleLock

    (tmp_path / "millstream.toml").write_text("[streams.s]\nsource.dsn='host=127.0.0.1 port=1'\n")
    home = Home(tmp_path)
    home.prepare()
    with RoleLock.take(home.run_folder, "run"):
        done = millstream("--home", str(tmp_path), "run")
    assert done.returncode == 1
    assert "error[home_busy]" in done.stderr
    assert str(os.getpid()) in done.stderr
    with RoleLock.take(home.run_folder, "owner"):
        assert "error[home_busy]" in millstream("--home", str(tmp_path), "capture", "run").stderr


def test_status_and_tables_of_a_home_that_has_never_run(tmp_path: Path) -> None:
    (tmp_path / "millstream.toml").write_text("[streams.s]\nsource.dsn='x'\n")
    done = here("--home", str(tmp_path), "status", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    nothing = {"id": None, "state": "never run", "errors": {}, "replication": None, "consumers": [], "regions": []}
    assert found["streams"] == [{"name": "s", **nothing}]
    assert set(found["processes"].values()) == {None}
    assert json.loads(here("--home", str(tmp_path), "tables", "--json").stdout) == []
    assert "never run" in here("--home", str(tmp_path), "status").stdout


def test_a_reader_that_has_enough_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "millstream.toml").write_text("[streams.s]\nsource.dsn='x'\n")
    for reads in ("head -1", "true"):
        command = f"{sys.executable} -m millstream.cli --home {tmp_path} config show | {reads}; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_an_append_whose_output_was_cut_fails(tmp_path: Path) -> None:
    """It exited with 0, and had left out the later rows."""
    (tmp_path / "millstream.toml").write_text("[streams.s]\n")
    append = f"{sys.executable} -m millstream.cli --home {tmp_path} append clicks --rows 1 --json"
    command = f"""(echo '{{"id": 1}}'; echo '{{"id": 2}}') | {append} | true; exit ${{PIPESTATUS[1]}}"""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        1,
        "appended so far, and durable: 1 row, from the first 1 line with a row\n",
    )


def test_who_only_looks_needs_no_password(tmp_path: Path) -> None:
    (tmp_path / "millstream.toml").write_text("[streams.shop]\nsource.dsn='postgresql://a:${NOT_SET_ANYWHERE}@h/d'\n")
    home = ("--home", str(tmp_path))
    done = here(*home, "status", "--json")
    assert json.loads(done.stdout)["problems"] == []
    assert here(*home, "tables", "ls").returncode == 0
    for words in (["wal", "ls"], ["query", "select 1"]):
        done = here(*home, *words)
        assert done.returncode == 2
        assert "stream shop has no log yet" in done.stderr
    done = millstream(*home, "run")
    assert done.returncode == 2
    assert "hint: export NOT_SET_ANYWHERE=…" in done.stderr
    assert "Mend" not in done.stderr


def test_config_show_is_toml_and_names_what_is_effective(tmp_path: Path) -> None:
    (tmp_path / "millstream.toml").write_text(
        '[streams.shop.source]\ndsn = "x"\n[streams.shop]\nshards = {"public.a" = 0}\n'
    )
    shown = tomllib.loads(here("--home", str(tmp_path), "config", "show").stdout)
    assert shown["streams"]["shop"]["source"]["slot"] == "millstream_shop"
    assert shown["streams"]["shop"]["source"]["publication"] == "millstream_shop"
    assert shown["streams"]["shop"]["shards"] == {"public.a": 0}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[streams.s]\nsource.dsn='x'\nlake.format='detla'\n", "not 'detla'"),
        ("[spark]\nmastr = 'x'\n", "did you mean master?"),
    ],
)
def test_a_mistake_is_told_with_what_was_meant(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "millstream.toml").write_text(text)
    assert said in here("--home", str(tmp_path), "config", "show").stderr


def test_a_mistyped_command_is_told_with_the_one_that_was_meant() -> None:
    assert "Did you mean status?" in here("stauts").stderr
    assert "Did you mean verify?" in here("wal", "verfy").stderr


def test_a_slot_is_not_dropped_unasked(tmp_path: Path) -> None:
    (tmp_path / "millstream.toml").write_text("[streams.s]\nsource.dsn='host=127.0.0.1 port=1'\n")
    done = here("--home", str(tmp_path), "slot", "drop")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error[usage]: there is no terminal to confirm on",
        "  hint: Run the command again, with --yes.",
    ]


def test_status_begins_with_the_mistakes_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "millstream.toml").write_text("[streams.a]\nsource.dsn='x'\n[strams.b]\nx=1\n[htp]\n")
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), pytest.raises(SystemExit):
        main(["--home", str(tmp_path), "status"])
    first, second, third, *_ = out.getvalue().splitlines()
    assert "problem: configuration: millstream.toml:3: strams: unknown key; did you mean streams?" in first
    assert second.startswith("  | millstream.toml:5: htp: unknown key; did you mean http?")
    assert third == f"{tmp_path}: nothing runs"


def test_status_of_one_stream(tmp_path: Path) -> None:
    (tmp_path / "millstream.toml").write_text("[streams.a]\nsource.dsn='x'\n[streams.b]\nsource.dsn='y'\n")
    found = json.loads(here("--home", str(tmp_path), "status", "--stream", "b", "--json").stdout)
    assert [stream["name"] for stream in found["streams"]] == ["b"]
    assert here("--home", str(tmp_path), "status", "--stream", "c").returncode == 2


@pytest.mark.siege
def test_doctor_says_that_it_compiles_before_it_does(tmp_path: Path) -> None:
    (tmp_path / "millstream.toml").write_text('[streams.shop.source]\ndsn = "host=127.0.0.1 port=1"\n')
    cache = tmp_path / "numba"
    (cache / "copying_1").mkdir(parents=True)
    environ = {"NUMBA_CACHE_DIR": str(cache), "NUMBA_DISABLE_JIT": "1"}  # its output, without half a minute of startup
    said = "compiling the decoders"
    assert said in millstream("--home", str(tmp_path), "doctor", environ=environ).stderr
    (cache / "pgoutput").mkdir()
    assert said not in millstream("--home", str(tmp_path), "doctor", environ=environ).stderr


def test_doctor_has_no_script_for_a_source_that_can_not_be_asked(tmp_path: Path) -> None:
    (tmp_path / "millstream.toml").write_text('[streams.shop.source]\ndsn = "host=127.0.0.1 port=1"\n')
    done = here("--home", str(tmp_path), "doctor", "--sql")
    assert done.returncode == 3
    assert done.stdout == ""
    assert "no statements for the source of shop, because the check failed" in done.stderr


def test_a_table_in_history_only_is_a_note_and_not_said_to_be_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    from millstream.administration.doctor import Diagnosis
    from millstream.cli.doctor import _print_diagnosis

    for blocks in ("source", "table", "current", "nothing"):
        _print_diagnosis(Diagnosis("source of shop", "code", blocks, blocks))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["wrong", "wrong", "note", "note"]
    assert ["stops the" in line for line in lines] == [True, True, False, False]

"""`millstream query` for people and programs: exact in every format, at a prompt, when interrupted, when piped."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from tests.cli.in_process import command
from tests.lake.landing import append_history
from tests.wal.plain_operations import plain_ops, plain_table

import millstream
from millstream.app.log_readers import open_reader
from millstream.cli.prompt import Prompt
from millstream.errors import PositionError
from millstream.home.config_mapping import lake_layout
from millstream.home.home import Home
from millstream.lake.commit_cuts import commit_cut
from millstream.lake.layout import LakeLayout
from millstream.lake.maintenance import MaintenanceRules, maintain_table
from millstream.model.ids import SchemaVersion, ShardId, SourceId, TableId
from millstream.model.positions import Seq
from millstream.model.records import record_schema
from millstream.model.schema import Column, TableSchema
from millstream.testing.errors import coded
from millstream.wal.writing.writer import LogWriter

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
KINDS = {
    "id": pa.int64(),
    "price": pa.decimal128(20, 10),
    "at": pa.timestamp("us", tz="UTC"),
    "local": pa.timestamp("us"),
    "day": pa.date32(),
    "raw": pa.binary(),
    "list": pa.list_(pa.int64()),
    "real": pa.float32(),
    "yes": pa.bool_(),
    "text": pa.string(),
}
ORDERS = TableSchema(
    table_id=TableId(3),
    version=SchemaVersion(1),
    source=SourceId(1),
    namespace="public",
    name="orders",
    columns=tuple(Column(name, kind) for name, kind in KINDS.items()),
    identity=("id",),
    key=("id",),
)
BIG = 2**53 + 1
FULL = {
    "id": BIG, "price": Decimal("-0.0000000001"), "at": NOON + timedelta(microseconds=7), "local": datetime(1999, 12, 31),  # noqa: DTZ001 - it has no zone in PostgreSQL either
    "day": date(2026, 2, 28), "raw": b"\0\xff", "list": [1, None, BIG], "real": 0.1, "yes": False, "text": 'a,"b"\nü',
}  # fmt: skip
EMPTY = dict.fromkeys(KINDS) | {"id": 1, "text": ""}
NULLS = dict.fromkeys(KINDS) | {"id": 2}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a log, and a lake of one table: three rows at noon, one of which is deleted a minute later."""
    path = tmp_path_factory.mktemp("home")
    (path / "millstream.toml").write_text('[streams.shop.source]\ndsn = "host=127.0.0.1 port=1"\n')
    opened = Home(path)
    opened.prepare()
    with opened.open_catalog() as catalog:
        stream = catalog.resolve_stream("shop")
        with LogWriter.open(
            str(opened.wal_folder("shop")),
            stream=stream,
            shards=[ShardId(0)],
            epoch=catalog.register_writer(stream)[1],
            reservations=catalog.reservations(stream),
        ) as log:
            log.append(plain_ops({1: [(plain_table(1, "orders"), 1, "a")]}, shard_of={1: 0}))
    layout = layout_of(path)
    land(layout, 3, NOON, [("c", FULL), ("c", EMPTY), ("c", NULLS)])
    land(layout, 4, NOON + timedelta(minutes=1), [("d", {"id": BIG})])
    return path


def layout_of(path: Path) -> LakeLayout:
    name, config = Home(path).stream_config(None)
    return lake_layout(Home(path), name, config, open_reader(Home(path), name).stream_id)


def land(layout: LakeLayout, n: int, time: datetime, rows: list[tuple[str, dict[str, object]]]) -> None:
    shape = record_schema(ORDERS)
    first = n - len(rows) + 1
    facts = [
        {**dict.fromkeys(shape.names), "__op": op, "__seq": seq, "__source": 1, "__commit_date": time.date(), **row}
        for seq, (op, row) in enumerate(rows, first)
    ]
    commit = append_history(layout, ORDERS, [pa.RecordBatch.from_pylist(facts, schema=shape)], Seq(n))
    commit_cut(layout, Seq(n), [commit], committed_at=time, commit_ts_max=time)


def query(home: Path, *words: str, stdin: str = "") -> subprocess.CompletedProcess[bytes]:
    return command("--home", str(home), "query", *words, stdin=stdin)


AT_NOON = ["FROM public.orders ORDER BY id", "--as-of", "2026-03-01T12:00"]


def test_csv_tells_nothing_from_an_empty_text_and_rounds_no_value(home: Path) -> None:
    done = query(home, *AT_NOON, "--format", "csv")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().splitlines(keepends=True)
    assert lines[:3] == [",".join(KINDS) + "\n", '1,,,,,,,,,""\n', "2" + "," * 9 + "\n"]
    assert next(csv.reader(io.StringIO("".join(lines[3:])))) == [
        str(BIG), "-0.0000000001", "2026-03-01 12:00:00.000007+00:00", "1999-12-31 00:00:00", "2026-02-28", "\\x00ff",
        f'[1, null, "{BIG}"]', "0.1", "false", 'a,"b"\nü',
    ]  # fmt: skip


def test_json_is_a_list_of_objects_whose_numbers_any_reader_holds(home: Path) -> None:
    done = query(home, *AT_NOON, "--json")
    assert json.loads(done.stdout) == [
        EMPTY,
        NULLS,
        {
            "id": str(BIG), "price": "-0.0000000001", "at": "2026-03-01 12:00:00.000007+00:00", "local": "1999-12-31 00:00:00",
            "day": "2026-02-28", "raw": "\\x00ff", "list": [1, None, str(BIG)], "real": 0.1, "yes": False, "text": 'a,"b"\nü',
        },
    ]  # fmt: skip
    sql = "SELECT {'a': 1.50, 'b': 'x'} s, MAP {'k': [NULL, true]} m, 'nan'::double f, -'infinity'::double i, 1.0::double o"
    assert json.loads(query(home, sql, "--json").stdout) == [
        {"s": {"a": "1.50", "b": "x"}, "m": {"k": [None, True]}, "f": "NaN", "i": "-Infinity", "o": 1.0}
    ]
    assert json.loads(query(home, "FROM public.orders WHERE false", "--json").stdout) == []
    repeated = query(home, "SELECT 1 AS id, 2 AS id_1, 3 AS id, 4 AS id", "--json")
    assert json.loads(repeated.stdout) == [{"id": 1, "id_1": 2, "id_2": 3, "id_3": 4}]


def test_arrow_is_a_stream_of_the_very_values(home: Path) -> None:
    found = pa.ipc.open_stream(query(home, *AT_NOON, "--format", "arrow").stdout).read_all()
    assert found.to_pylist() == [EMPTY, NULLS, {**FULL, "real": pytest.approx(0.1)}]
    assert found.schema.field("price").type == KINDS["price"]


def test_a_table_for_people_keeps_a_row_to_a_line(home: Path) -> None:
    lines = query(home, *AT_NOON).stdout.decode().splitlines()
    assert len(lines) == 4
    assert lines[0].split() == list(KINDS)
    assert 'a,"b"\\nü' in lines[3]


@pytest.mark.parametrize(
    ("when", "ids"),
    [
        ("2026-03-01T13:00:30+01:00", [1, 2, BIG]),
        ("2026-03-01 12:01", [1, 2]),
        ("2026-03-02", [1, 2]),
        ("now", [1, 2]),
        ("1s ago", [1, 2]),
    ],
)
def test_a_moment_may_be_written_as_people_do(home: Path, when: str, ids: list[int]) -> None:
    done = query(home, "SELECT id FROM public.orders ORDER BY 1", "--as-of", when, "--format", "csv")
    assert [int(line) for line in done.stdout.split()[1:]] == ids
    assert b"\nat " in b"\n" + done.stderr


@pytest.mark.parametrize(
    ("when", "code", "exit_code"),
    [
        ("2026-02-28", b"beyond_retention", 1),
        ("2999-01-01", b"time_from_future", 1),
        ("yesterday-ish", b"invalid_time", 2),
        ("99999999999w ago", b"invalid_time", 2),
        ("00000000.s1", b"invalid_token", 2),
        ("{stream}.s99", b"token_from_future", 1),
    ],
)
def test_a_moment_that_cannot_be_shown_says_why_and_what_to_do(
    home: Path, when: str, code: bytes, exit_code: int
) -> None:
    """A future time ended with the exit code of a wrong usage, unlike a token of the future."""
    stream = layout_of(home).stream_id.hex[:8]
    done = query(home, "SELECT 1", "--as-of", when.format(stream=stream))
    assert done.returncode == exit_code
    assert b"error[" + code + b"]" in done.stderr
    assert done.stdout == b""


def test_statements_may_come_from_stdin(home: Path) -> None:
    done = query(home, "--format", "csv", stdin="SELECT 1 AS a; -- one;\nSELECT ';' AS b;\n")
    assert done.stdout == b"a\n1\nb\n;\n"
    none = query(home, stdin=" -- nothing\n")
    assert (none.returncode, none.stdout) == (2, b"")
    two = query(home, "SELECT 1; SELECT 2", "--format", "arrow")
    assert (two.returncode, two.stdout) == (2, b"")


@pytest.mark.long
def test_a_reader_that_has_enough_ends_it_quietly(home: Path) -> None:
    for style in ("csv", "json", "table", "arrow"):
        words = [sys.executable, "-m", "millstream.cli", "--home", str(home), "query"]
        sql = "SELECT i, repeat('x', 100) FROM range(100000000) r(i)"
        process = subprocess.Popen([*words, sql, "--format", style], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(100_000)
        process.stdout.close()
        # The full result would be ten gigabytes: the command ends, so it didn't gather the rows first.
        assert process.wait(180) == 0
        assert process.stderr.read() == b""
        process.stderr.close()


def wait_for_work(pid: int) -> None:
    """Wait until the process has used two more seconds of CPU: only the query takes that long."""

    def spent_s() -> float:
        user = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11]
        return int(user) / os.sysconf("SC_CLK_TCK")

    begun, deadline = spent_s(), time.monotonic() + 60
    while spent_s() < begun + 2:
        assert time.monotonic() < deadline, "the query doesn't begin"
        select.select([], [], [], 0.1)


@pytest.mark.long
def test_an_interrupt_ends_the_query_that_runs(home: Path) -> None:
    words = [sys.executable, "-m", "millstream.cli", "--home", str(home), "query"]
    endless = "SELECT 'begun' UNION ALL SELECT sum(a.i * b.i)::text FROM range(10000000) a(i), range(10000000) b(i)"
    process = subprocess.Popen([*words, endless, "--format", "csv"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for_work(process.pid)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 130, said
    assert b"interrupted" in said


def test_python_asks_the_same(home: Path) -> None:
    with millstream.open(home) as opened:
        ids = "SELECT id FROM public.orders ORDER BY id"
        assert opened.query(ids).column(0).to_pylist() == [1, 2]
        assert opened.query(ids, as_of=NOON).column(0).to_pylist() == [1, 2, BIG]
        assert opened.query(ids, as_of="2026-03-01T12:00:59").column(0).to_pylist() == [1, 2, BIG]
        with opened.lake(as_of=datetime(2026, 3, 1, 12)) as lake:  # noqa: DTZ001 - without a zone it is UTC
            assert lake.query(ids).num_rows == 3
            before = lake.token
        assert opened.query(ids, as_of=before, stream="shop").num_rows == 3
        for wrong, code in (
            ("soon", "invalid_time"),
            ("00000000.s1", "invalid_token"),
            (date(1, 1, 2).isoformat(), "beyond_retention"),
        ):
            with pytest.raises(PositionError, check=coded(code)):
                opened.query(ids, as_of=wrong)


_CUT = re.compile(r"\x1b(\[[0-9;?]*)?\Z")


class Terminal:
    """A pseudo-terminal that runs `millstream query`."""

    def __init__(self, home: Path, *words: str) -> None:
        self.master, slave = pty.openpty()
        environ = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "COLUMNS": "200"}
        command = [sys.executable, "-m", "millstream.cli", "--home", str(home), "query", *words]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environ, start_new_session=True,
            preexec_fn=_take_the_terminal,  # noqa: PLW1509 - this process has one thread
        )  # fmt: skip
        os.close(slave)
        self.seen = self.raw = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def until(self, pattern: str) -> str:
        """Return the output up to the match, without escape sequences; the rest stays for the next call."""
        deadline = time.monotonic() + 60
        while (found := re.search(pattern, self.seen)) is None:
            ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {pattern!r} in {self.seen!r}"
            try:
                self.raw += os.read(self.master, 65536).decode(errors="replace")
            except OSError as error:
                raise AssertionError(f"it ended before {pattern!r}: {self.seen!r}") from error
            # An escape sequence may be split over two reads.
            whole, escape, rest = self.raw.rpartition("\x1b") if _CUT.search(self.raw) else (self.raw, "", "")
            self.seen += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", whole)
            self.raw = escape + rest
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before


def _take_the_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextmanager
def terminal(home: Path, *words: str) -> Iterator[Terminal]:
    opened = Terminal(home, *words)
    try:
        yield opened
    finally:
        if opened.process.poll() is None:
            opened.process.kill()
        opened.process.wait()
        os.close(opened.master)


@pytest.mark.long
def test_the_prompt_takes_statements_of_several_lines_completes_and_remembers(home: Path) -> None:
    with terminal(home) as shown:
        shown.until(r"shop>")
        shown.type("SELECT count(*)\n")
        shown.type("AS n, ';' AS text FROM public.ord\t")
        shown.until("orders")
        shown.type(";\n")
        assert re.search(r"\n\s*2\s+;", shown.until(r"1 row in"))
        shown.until("shop>")
        shown.type("\\dt\n")
        shown.until(r"history\.\"public\.orders\"")
        shown.until(r"public\.orders")
        shown.type("\\d public.orders\n")
        shown.until(r"DECIMAL\(20,10\)")
        shown.type("\\as-of 2026-03-01T12:00\n")
        shown.until("shop@2026-03-01T12:00>")
        shown.type("\\format csv\nSELECT count(*) FROM public.orders;\n")
        assert re.search(r"count_star\(\)\r?\n3\r?\n", shown.until("1 row in"))
        shown.type("\\as-of\n")
        shown.until("shop>")
        shown.type("SELECT nothing;\n")
        shown.until(r"error\[invalid_query\]")
        shown.type("\\nothing\n")
        shown.until(r"error\[usage\]")
        shown.until("shop>")  # before the prompt, the terminal itself would take Ctrl-D
        shown.type("\x04")
        assert shown.process.wait(180) == 0
    history = home / "data" / "query_history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert "+AS n, ';' AS text FROM public.orders" in history.read_text()
    with terminal(home) as again:
        again.until("shop>")
        again.type("\x1b[A")
        again.until("nothing")
        again.type("\n")
        again.until(r"error\[usage\]")
        again.until("shop>")
        again.type("help\n")
        again.until(r"Tab completes")
        again.until("shop>")
        again.type("quit\n")
        assert again.process.wait(180) == 0
    for word in ("exit", "EXIT;", "\\q"):
        with terminal(home) as third:
            third.until("shop>")
            third.type(f"{word}\n")
            assert third.process.wait(180) == 0


@pytest.mark.long
def test_the_prompt_sees_each_new_cut_and_outlives_a_query_that_is_cancelled(home: Path) -> None:
    count = "SELECT 'rows', count(*) FROM public.orders;\n"
    with terminal(home) as shown:
        shown.until("shop>")
        shown.type(count)
        shown.until(r"rows'?\s+2\b")
        shown.until("shop>")
        shown.type("SELECT sum(a.i * b.i) FROM range(10000000) a(i), range(10000000) b(i);\n")
        shown.until(r"b\(i\);")
        shown.until("\n")
        wait_for_work(shown.process.pid)
        shown.type("\x03\x03")
        shown.until("cancelled")
        shown.until("shop>")
        land(layout_of(home), 5, NOON + timedelta(minutes=2), [("c", {**NULLS, "id": 77})])
        shown.type(count)
        shown.until(r"rows'?\s+3\b")
        shown.type("\\q\n")
        assert shown.process.wait(180) == 0
    land(layout_of(home), 6, NOON + timedelta(minutes=3), [("d", {"id": 77})])


def test_the_prompt_outlives_maintenance_that_deletes_files_while_nothing_new_comes(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the cut nor the log's end moves then: every statement failed, until the user asked for a new session."""
    own = tmp_path / "home"
    shutil.copytree(home, own)
    layout = layout_of(own)
    prompt = Prompt(Home(own), None, as_of=None, lake_only=False, style="json")
    count = "SELECT count(*) AS n, sum(id) AS s FROM public.orders;"
    prompt._take(count)
    before = capsys.readouterr().out
    rules = MaintenanceRules(compact_files=2)
    in_a_while = time.time_ns() // 1_000_000 + 10_000_000
    done = maintain_table(layout, "history", ORDERS, now_ms=in_a_while, rules=rules)
    assert done.files_deleted == done.files_compacted > 1
    prompt._take(count)
    assert capsys.readouterr().out == before
    prompt._lake.close()


def test_a_table_without_a_key_is_named_unless_its_history_is_asked(tmp_path: Path) -> None:
    home = str(tmp_path / "web")
    assert command("init", home, "--stream", "web").returncode == 0
    with millstream.open(home) as opened:
        opened.append("web", "clicks", [{"page": "/"}])
    said = command("--home", home, "query", "select 'public.clicks'").stderr.decode()
    assert 'not readable: public.clicks: has no key: its records are in history."public.clicks"' in said
    # The prompt's session outlives its statements, too: it repeated the note after each of them.
    for sql, times in (("select 'clicks'; select 1", 1), ("select 'clicks'; show tables", 2)):
        assert command("--home", home, "query", sql).stderr.decode().count("not readable") == times
    asked = command("--home", home, "query", "--format=csv", 'select page from history."public.clicks"')
    assert asked.stdout.decode().split() == ["page", "/"]
    assert "not readable" not in asked.stderr.decode()

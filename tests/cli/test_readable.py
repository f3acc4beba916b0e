"""Foreign names and values: none acts on an operator's terminal, and programs get them unchanged."""

from __future__ import annotations

import io
import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.app.homes import make_home, run

import millstream
import millstream.cli
from millstream.cli.context import name_home, note, print_table, say
from millstream.cli.diff import print_outcome
from millstream.cli.main import say_error
from millstream.cli.query_output import STYLES, write_result
from millstream.diff.compare import Compared, TableDiff
from millstream.model.human_text import readable
from millstream.model.names import quote_ident
from millstream.processes.logs import Words

EVIL = "t\x1b]0;owned\x07\x9b31m\x7f\x85\r\x08\nhint: run something"
"""A value that sets a terminal's title and its colour, and looks like a line of Millstream's output."""
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f]")


def is_acted_on(character: str) -> bool:
    """Return whether a terminal or a browser acts on a character, or it ends a line, or can't be encoded."""
    turns = unicodedata.bidirectional(character) in {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    marks = {"\u061c", "\u200e", "\u200f", "\u2028", "\u2029"}
    return turns or character in marks or unicodedata.category(character) in {"Cc", "Cs"}


@given(st.text(st.characters() | st.characters(categories=["Cc", "Cf", "Zl", "Zp"])))
def test_only_control_characters_are_changed(text: str) -> None:
    shown = readable(text)
    assert not any(map(is_acted_on, shown))
    shown.encode()  # no half of a character is left
    if not any(map(is_acted_on, text)):
        assert shown == text
    assert "\n".join(map(readable, ["a", "b"])) == "a\nb"


def test_how_they_are_written() -> None:
    assert readable("gpj.\u202eexe") == "gpj.\\u202eexe"
    assert readable("a\n\r\t\x00\x1b\x7f\x9b\ud800é💧\\") == "a\\n\\r\\t\\x00\\x1b\\x7f\\x9b\\ud800é💧\\"


def test_commands_show_names_of_others_without_what_a_terminal_acts_on(tmp_path: Path) -> None:
    home = make_home(tmp_path / "home", "[streams.web]\n")
    table = f"public.{quote_ident(EVIL)}"
    with millstream.open(home) as opened:
        opened.append("web", table, [{EVIL: EVIL}])
    for words in (
        ("tables",),
        ("status",),
        ("wal", "stats"),
        ("wal", "stats", "--table", table),
        ("wal", "inspect"),
        ("wal", "ls"),
        ("route", "explain", table),
        ("tables", "retry", table),
        ("tables", "retry", f"{table}.nothing"),
        ("--debug", "tables", "retry", f"{table}.nothing"),
        ("wal", "cat", "--table", table, "--format", "csv", "--from-offset", EVIL),
    ):
        ended = run(home, *words)
        for text in (ended.stdout, ended.stderr):
            assert not CONTROL.search(text), (words, text)
            assert not any(line.startswith("hint: run something") for line in text.splitlines()), (words, text)
    assert readable(EVIL) in run(home, "tables").stdout
    assert table in _values(json.loads(run(home, "tables", "--json").stdout))
    record = json.loads(run(home, "wal", "cat").stdout.split("\n")[0])
    assert record["row"] == {EVIL: EVIL}


def test_a_count_of_one_is_singular_and_a_wrong_place_is_told_as_that(tmp_path: Path) -> None:
    home = make_home(tmp_path / "home", "[streams.web]\n")
    with millstream.open(home) as opened:
        opened.append("web", "t", [{"a": 1}])
    for words in (("wal", "verify"), ("wal", "stats")):
        assert run(home, *words).stdout.startswith("1 segment, ")
    for words, said in (
        (("wal", "inspect", "--seq", "5-1"), "5 is above 1"),
        (("wal", "export", "-o", str(tmp_path)), "is a folder, and ndjson needs a file"),
        (
            ("wal", "export", "--format", "csv", "-o", str(home / "millstream.toml")),
            "is a file, and csv needs a folder",
        ),
    ):
        refused = run(home, *words)
        assert (refused.returncode, said in refused.stderr) == (2, True), refused.stderr
    assert (
        f"hint: Read from the end or an earlier offset; `millstream --home {home} wal ls`"
        in run(home, "wal", "cat", "--from-offset", "9").stderr
    )


def test_a_compared_table_of_one_row_has_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    print_outcome(TableDiff("public.a", Compared.EQUAL, rows_source=1, rows_lake=1))
    print_outcome(TableDiff("public.b", Compared.DIFFERENT, rows_source=2, rows_lake=1, different=1))
    assert capsys.readouterr().out.splitlines() == [
        "public.a: equal, 1 row",
        "public.b: 1 key differs, 1 row in the lake, 2 in the source",
    ]


def test_a_command_for_another_node_names_no_home_of_this_one(capsys: pytest.CaptureFixture[str]) -> None:
    name_home("/srv/a")
    try:
        note("Run `millstream run` on b, `millstream token create` there, or `millstream status`.")
    finally:
        name_home(None)
    said = "Run `millstream run` on b, `millstream token create` there, or `millstream --home /srv/a status`.\n"
    assert capsys.readouterr().err == said


def _values(told: Any) -> list[Any]:
    if isinstance(told, dict):
        return [value for inner in told.values() for value in _values(inner)]
    if isinstance(told, list):
        return [value for inner in told for value in _values(inner)]
    return [told]


@pytest.mark.parametrize("style", STYLES)
def test_results_are_escaped_for_people_alone(style: Any) -> None:
    batch = pa.record_batch({EVIL: [EVIL, None], "n": [1, 2]})
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="")
    write_result(pa.RecordBatchReader.from_batches(batch.schema, [batch]), style, out)
    out.flush()
    data = out.buffer.getvalue()  # type: ignore[attr-defined]
    if style == "arrow":
        assert pa.ipc.open_stream(data).read_all().column_names == [EVIL, "n"]
        return
    text = data.decode()
    if style == "table":
        assert not CONTROL.search(text)
        assert len(text.splitlines()) == 3
        assert text.count(readable(EVIL)) == 2
    elif style == "csv":
        assert text.startswith(f'"{EVIL}",n\n"{EVIL}",1\n')
    else:
        assert json.loads(text)[0] == {EVIL: EVIL, "n": 1}


def test_every_way_to_speak_to_people(capsys: pytest.CaptureFixture[str]) -> None:
    say(EVIL)
    note(EVIL)
    print_table([EVIL, "b"], [[EVIL, 1], ["x", 2]])
    say_error({"code": "unknown_table", "message": EVIL, "hint": EVIL})
    said = capsys.readouterr()
    assert not CONTROL.search(said.out)
    assert not CONTROL.search(said.err)
    assert len(said.out.splitlines()) == 1 + 3
    lines = said.err.splitlines()
    assert lines[1].startswith("error[unknown_table]: t\\x1b]0;owned")
    assert lines[2] == "  | hint: run something"
    assert lines[3].startswith("  hint: t\\x1b")
    assert len(lines) == 4


def test_log_lines_for_people_are_lines() -> None:
    line = Words(terminal=True)(
        None, "info", {"event": EVIL, "stream": EVIL, "table": EVIL, "error": EVIL, "code": EVIL}
    )
    assert line.startswith("\r\x1b[K"), "that of ours stays"
    assert not CONTROL.search(line.removeprefix("\r\x1b[K"))
    assert "\n" not in line
    traced = Words(terminal=False)(None, "error", {"event": "e", "exception": f"Traceback:\n  {EVIL}"})
    assert not CONTROL.search(traced)
    assert traced.startswith("e\nTraceback:\n  t\\x1b]0")


def test_no_command_prints_around_it() -> None:
    folder = Path(millstream.cli.__file__).parent
    printing = re.compile(r"click\.s?echo\(|(?<![\w.])print\(|click\.style\(")
    allowed = {"context.py", "query_output.py", "diff.py"}
    assert {file.name for file in folder.glob("*.py") if printing.search(file.read_text())} == allowed

"""Each house rule finds its breach."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def rules(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("house_rules")


@pytest.mark.parametrize(
    "line",
    ["# TO" + "DO: later", "see https://registry" + ".unheard-of.net/simple", "open('/ro" + "ot/.cache/x')"],
)
def test_a_line_that_breaks_a_rule_is_found(rules: ModuleType, line: str) -> None:
    assert len(list(rules.line_breaches(Path("a.py"), f"fine\n{line}\n"))) == 1


@pytest.mark.parametrize("line", ["http://127.0.0.1:8787/", "https://user@shop.example/x", "a/work/b", "~/root/x"])
def test_a_line_that_keeps_the_rules_passes(rules: ModuleType, line: str) -> None:
    assert list(rules.line_breaches(Path("a.py"), line)) == []


def test_a_crowded_folder_is_found(rules: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = tmp_path / "src" / "room"
    room.mkdir(parents=True)
    monkeypatch.setattr(rules, "ROOT", tmp_path)
    for name in "abc":
        (room / f"{name}.py").write_text("\n" * 2000)
    assert list(rules.folder_breaches()) == []
    (room / "d.py").write_text("\n")
    assert list(rules.folder_breaches()) == [
        "src/room:1: 6001 lines in its modules; past 6000 it gets rooms of its own"
    ]


def test_a_long_module_and_an_idle_function_are_found(rules: ModuleType) -> None:
    long = "\n" * 601
    idle = 'def idle():\n    """Say nothing."""\n    pass\n'

    assert list(rules.module_breaches(Path("src/a.py"), long)) == ["src/a.py:1: 601 lines; past 600 it is two modules"]
    assert list(rules.module_breaches(Path("tests/a.py"), long)) == []
    assert list(rules.module_breaches(Path("tests/a.py"), idle)) == ["tests/a.py:1: idle() does nothing"]


def test_a_module_imports_nothing_from_its_own_package(rules: ModuleType) -> None:
    """Two threads that import the package and the module at once would wait for each other."""
    text = "from millstream.catalog import sql_tables\n"
    (found,) = rules.module_breaches(Path("src/millstream/catalog/tables.py"), text)
    assert found.startswith("src/millstream/catalog/tables.py:1: from millstream.catalog import")
    assert list(rules.module_breaches(Path("src/millstream/lake/a.py"), text)) == []


@pytest.mark.parametrize(
    ("name", "is_there"),
    [
        ("wal.reader", True),
        ("reader.Stream.read", True),
        ("millstream.wal.reader.Stream", True),
        ("wal.Stream", True),
        ("Stream.read", True),
        ("public.orders", True),
        ("replay.Stream", False),
        ("reader.Log", False),
        ("wal.writer", False),
    ],
)
def test_a_docstring_names_no_module_that_was_renamed(rules: ModuleType, name: str, *, is_there: bool) -> None:
    sources = {
        Path("wal/__init__.py"): "",
        Path("wal/reader.py"): "class Stream:\n    def read(self): ...\n",
        Path("lake/replays.py"): f'"""The replay.\n\nSee `{name}`.\n"""\n',
    }
    wanted = [] if is_there else [f"lake/replays.py:3: {name} isn't there; name the module that has it now"]
    assert list(rules.stale_names(sources)) == wanted


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import threading\nthreading.Thread(target=print).start()\n", "threading.Thread"),
        ("import os\nfrom threading import Event, Thread\n", "threading.Thread"),
        ("import os\nos.replace('a', 'b')\n", "os.replace"),
        ("import os\nos.fsync(1)\n", "os.fsync"),
    ],
)
def test_what_has_one_home_is_found_elsewhere(rules: ModuleType, text: str, name: str) -> None:
    (found,) = rules.module_breaches(Path("src/millstream/lake/a.py"), text)
    assert found.startswith(f"src/millstream/lake/a.py:2: {name}; use millstream.")
    assert list(rules.module_breaches(Path("tests/a.py"), text)) == []
    home = "workers.py" if "Thread" in name else "private_files.py"
    assert list(rules.module_breaches(Path("src/millstream") / home, text)) == []

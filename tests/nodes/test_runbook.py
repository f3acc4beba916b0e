"""Run the commands of `docs/how-to/fail-over.md` in order on two nodes, and compare their output with the page."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from markdown_it import MarkdownIt
from tests.app.homes import wait_for
from tests.commands import Command
from tests.nodes.nodes import STREAM, Node, eventually, nodes

from millstream.processes.role_locks import holder
from millstream.testing.pytest_plugin import Database

pytestmark = pytest.mark.siege

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "fail-over.md"
LOOKS: Final = {"replicas", "status"}
"""Commands that change nothing: their output may take a moment to match."""


@dataclass(frozen=True)
class Step:
    """One command of the page."""

    section: str
    node: str
    words: tuple[str, ...]
    shown: tuple[str, ...]
    """The lines below it on the page."""

    def is_shown_by(self, printed: str) -> bool:
        """Return whether each of them came, in order; `…` matches anything, and any run of blanks separates words."""
        words = [re.sub(r"\s+", " ", line).strip() for line in self.shown]
        lines = [".*?".join(map(re.escape, line.split("…"))) for line in words]
        found = [re.sub(r"\s+", " ", line).strip() for line in printed.splitlines()]
        wanted = iter(found)
        return all(any(re.fullmatch(line, one) for one in wanted) for line in lines)


def steps_of(text: str) -> Iterator[Step]:
    """Return the commands of a page's console blocks. A block's node is the last one named in the text before it."""
    section = node = ""
    tokens = MarkdownIt("commonmark").parse(text)
    for at, token in enumerate(tokens):
        if token.type == "inline" and tokens[at - 1].type == "heading_open":
            section, node = token.content, ""
        elif token.type == "inline":
            node = (re.findall(r"[Oo]n `([ab])`", token.content) or [node])[-1]
        elif token.type == "fence" and token.info == "console":
            for block in token.content.removeprefix("$ ").split("\n$ "):
                command, *shown = block.splitlines()
                program, *words = command.split()
                assert (program, bool(node)) == ("millstream", True), command
                yield Step(section, node, tuple(words), tuple(shown))


def follow_step(step: Step, node: Node) -> None:
    """Run a step of the page, and check its output against the page's; retry commands that only look."""
    if step.words == ("run",):
        node.start("run")
        return

    said = ""

    def is_so() -> bool:
        nonlocal said
        done = Command(
            ["--home", str(node.home), *step.words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # as a terminal has both
            text=True,
            env={**os.environ, "HOME": "/nonexistent"},
        )
        said, _ = done.communicate(timeout=600)
        fails = any(line.startswith("error[") for line in step.shown)
        assert (done.returncode != 0) == fails, (step, said)
        return step.is_shown_by(said)

    if step.words[0] in LOOKS:
        wait_for(is_so, what=lambda: (step, said))
    else:
        assert is_so(), (step, said)


def test_the_runbook_is_followed_word_by_word(tmp_path: Path, postgres: Database) -> None:
    slot = f"runbook_{os.getpid()}"
    source = f'[streams.{STREAM}.source]\ndsn = {json.dumps(postgres.dsn)}\nslot = "{slot}"\n'
    sections: dict[str, list[Step]] = {}
    for step in steps_of(PAGE.read_text()):
        sections.setdefault(step.section, []).append(step)
    with postgres.connect() as connection, nodes(tmp_path, stream=source) as (a, b):
        by_name = {"a": a, "b": b}

        def insert(first: int, last: int) -> None:
            connection.execute(f"INSERT INTO orders SELECT generate_series({first}, {last})")

        def have(last: int, *of: Node) -> None:
            for node in of:
                # A log that is being cut back can't be read for a moment.
                eventually(
                    lambda node=node: sorted(node.rows()) == list(range(1, last + 1)), f"{last} at {node.name}", *of
                )

        connection.execute("CREATE TABLE orders (id bigint PRIMARY KEY)")
        insert(1, 10)
        assert b.ask("follow", "a", "--only-note").returncode == 0
        a.start("run")
        b.start("run")
        have(10, a, b)
        eventually(lambda: b.tables_that_came() == {"orders": "streaming"}, "b knows that the copy is done", a, b)
        for section, steps in sections.items():
            if section.startswith("2."):
                a.end("run", signal.SIGKILL)
                # Its parts notice that, and end.
                eventually(
                    lambda: not any(holder(a.home / "data" / "run", part) for part in ("owner", "serve")), "a ends", a
                )
                insert(11, 20)
            for step in steps:
                follow_step(step, by_name[step.node])
            if section.startswith("3."):
                have(20, b)
            if section.startswith("4."):
                insert(21, 30)
                have(30, a, b)
            if section.startswith("5."):
                insert(31, 40)
                have(40, a, b)
        assert [section[:2] for section in sections] == ["1.", "2.", "3.", "4.", "5."]
        assert a.bytes_of_log() == b.bytes_of_log()

"""Homes made by hand, and commands run as a user runs them: in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.commands import run_command


def wait_for(
    condition: Callable[[], object], *, seconds: float = 120.0, what: Callable[[], object] = lambda: None
) -> None:
    """Return once the condition holds; at the deadline fail the test, with the state known by then."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


def config(source: str, catalog: str | None, *, stream: str = "shop", tables: str = '["*.*"]') -> str:
    where = "" if catalog is None else f"[catalog]\nurl = {json.dumps(catalog)}\n"
    return f"{where}[streams.{stream}.source]\ndsn = {json.dumps(source)}\ntables = {tables}\n"


def make_home(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "millstream.toml").write_text(text)
    return folder


def run(
    home: Path, *words: str, stdin: str = "", network: str = "", **environ: str
) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "HOME": "/nonexistent", **environ}
    return run_command(["--home", str(home), *words], stdin=stdin, env=environ, network=network)


def done(home: Path, *words: str, **environ: str) -> str:
    ended = run(home, *words, **environ)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout

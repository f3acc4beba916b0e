"""Homes driven as a user drives them: by commands, each a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from psycopg import sql

from bench.places import as_installed
from bench.source import DATABASE, drop_slot
from millstream.testing.postgres import EmbeddedPostgres

MILLSTREAM = str(Path(sys.executable).parent / "millstream")
STREAM = "bench"
_WAIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Home:
    """A home of one stream over one database."""

    path: Path

    @property
    def wal(self) -> str:
        """The folder of the stream's log."""
        return str(self.path / "data" / "wal" / STREAM)

    def command(self, *words: str) -> list[str]:
        """Return the command line of a command on this home."""
        return [MILLSTREAM, "--home", str(self.path), *words]

    def run(self, *words: str) -> None:
        """Run a command to its end; show its messages if it fails."""
        done = subprocess.run(self.command(*words), capture_output=True, text=True, env=as_installed())
        if done.returncode:
            raise RuntimeError(f"millstream {' '.join(words)} ended with {done.returncode}:\n{done.stderr[-4000:]}")

    def forget(self, server: EmbeddedPostgres) -> None:
        """Drop the home's slot and publication at the source, so that the next home starts from the same state."""
        drop_slot(server, f"millstream_{STREAM}")
        with server.connect(DATABASE) as connection:
            for name in connection.execute("SELECT pubname FROM pg_publication").fetchall():
                connection.execute(sql.SQL("DROP PUBLICATION {}").format(sql.Identifier(name[0])))

    @contextmanager
    def running(self, *words: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a command in the background; at the end interrupt it, as a user would by Ctrl-C, and wait for it."""
        log = self.path.parent / f"{words[0]}.log"
        with log.open("ab") as messages:
            process = subprocess.Popen(self.command(*words), stdout=messages, stderr=messages, env=as_installed())
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def make_home(server: EmbeddedPostgres, path: Path, tables: Sequence[str], *, lake: str = "") -> Home:
    """Run `millstream init`; `lake` has lines of the stream's section `lake`."""
    named = [word for table in tables for word in ("--tables", table)]
    source = server.dsn(DATABASE)
    subprocess.run(
        [MILLSTREAM, "init", str(path), "--stream", STREAM, "--source", source, *named],
        check=True,
        capture_output=True,
        env=as_installed(),
    )
    if lake:
        file, section = path / "millstream.toml", f"[streams.{STREAM}.lake]\n"
        text = file.read_text()
        assert section in text, "init writes the section"
        file.write_text(text.replace(section, f"{section}{lake}\n"))
    return Home(path)


def wait_for(what: str, seen: object, *, process: subprocess.Popen[bytes] | None = None) -> None:
    """Return once `seen()` is true; raise if it doesn't become true, or the process ends before."""
    assert callable(seen)
    deadline = time.monotonic() + _WAIT_S
    while not seen():
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"the process ended with {process.returncode} before {what}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {_WAIT_S:.0f} s for {what}")
        time.sleep(0.05)

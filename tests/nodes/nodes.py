"""Several homes as nodes of one stream that applications write, each with its own processes: who writes, who serves, who follows."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.app.homes import make_home, run, wait_for
from tests.commands import Command

from millstream.codec.log_segment import SEGMENT_HEADER_SIZE
from millstream.errors import LogError, LogTruncated, OffsetExpired
from millstream.home.home import Home
from millstream.model.positions import Seq
from millstream.nodes.catalog_document import CATALOG
from millstream.nodes.follower_state import FollowingNotes
from millstream.testing._servers.ports import free_port
from millstream.wal.reader import StreamReader

STREAM: Final = "shop"


class Node:
    """One home, and its processes by name. `start` and `kill` as often as one likes."""

    def __init__(
        self,
        folder: Path,
        name: str,
        ports: dict[str, int],
        *,
        acks: str = "local",
        more: str = "",
        stream: str = "",
        others: dict[str, int] | None = None,
        http: int = 0,
        network: str = "",
    ) -> None:
        """Make its home.

        Args:
            folder: where.
            name: its own.
            ports: where Flight of each node listens.
            acks: the stream's level.
            more: what else `[replication]` has.
            stream: what else the stream has.
            others: where it reaches other nodes, if not there.
            http: its port for HTTP; 0: any.
            network: the file of the network namespace in which its processes are to run; empty: this one's.
        """
        self.name: Final = name
        nodes = "\n".join(f'{node} = "grpc://127.0.0.1:{port}"' for node, port in (ports | (others or {})).items())
        self._port: Final = ports[name]
        self.home: Final = make_home(
            folder,
            f'[streams.{STREAM}]\nacks = "{acks}"\n{stream}[streams.{STREAM}.ingest]\nschema_on_write = "create"\n'
            f'[http]\nlisten = "127.0.0.1:{http}"\n[flight]\nlisten = "127.0.0.1:{ports[name]}"\n'
            f'[replication]\nnode = "{name}"\n{more}[replication.nodes]\n{nodes}\n',
        )
        self._network: Final = network
        self._processes: dict[str, Command] = {}

    def start(self, part: str, *words: str) -> Command:
        """Start one of its processes: `owner`, `serve`, `follow`, or `run` with all of them and the pipeline; more words go to the command."""
        command = {"owner": ["capture", "run"], "serve": ["serve"], "follow": ["follow"], "run": ["run"]}[part]
        with (self.home / f"{part}.log").open("ab") as output:
            words = "--home", str(self.home), *command, *words
            environ = {**os.environ, "HOME": "/nonexistent"}
            process = Command(words, stdout=output, stderr=output, env=environ, network=self._network)
        self._processes[part] = process
        return process

    def end(self, part: str, how: signal.Signals = signal.SIGTERM) -> int:
        """End a process, and wait for it."""
        process = self._processes.pop(part)
        process.send_signal(how)
        return process.wait(180)

    def kill(self) -> None:
        """SIGKILL all that it runs."""
        for part in list(self._processes):
            self.end(part, signal.SIGKILL)

    def runs(self, part: str) -> bool:
        """Whether the process is there."""
        return part in self._processes and self._processes[part].poll() is None

    def parts(self) -> list[str]:
        """Those that were started and not ended: they run, or have ended by themselves."""
        return sorted(self._processes)

    def signal(self, part: str, how: signal.Signals) -> None:
        """Send it a signal."""
        self._processes[part].send_signal(how)

    def log(self, part: str) -> str:
        """What a process has said."""
        with contextlib.suppress(FileNotFoundError):
            return (self.home / f"{part}.log").read_text()
        return ""

    def is_there(self) -> bool:
        """Whether others can ask it who leads."""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1):
            return True
        return False

    def url(self) -> str:
        """Where its HTTP listens; nothing before it does."""
        found = re.findall(r"listening \(address ([\d.:]+)\)", self.log("serve"))
        return f"http://{found[-1]}" if found else ""

    def ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command, to its end."""
        return run(self.home, *words, network=self._network)

    def answer(self, *words: str) -> Any:
        """What a command prints with `--json`; it has to succeed."""
        done = self.ask(*words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def rows(self, column: str = "id", *, durable: bool = False) -> list[Any]:
        """A column of all records, in the log's order; none where there is no log yet, or it is just cut back to what its leader has.

        Args:
            column: its name.
            durable: with those that are shown to nobody until others are known to hold them.
        """
        folder = self.home / "data" / "wal" / STREAM
        if not folder.is_dir():
            return []
        reader = StreamReader(str(folder), durable=durable)
        found: list[Any] = []
        # One that has led is cut back when it follows: a file may go while it is read.
        try:
            for some in reader.read_between(Seq(reader.first_seq() - 1), reader.persisted_upto()):
                found += some.batch.column(column).to_pylist()
        except (LogError, LogTruncated, OffsetExpired):
            return []
        return found

    def tables_that_came(self) -> dict[str, str]:
        """As a follower: the state of each table in the newest catalog that its leader has sent; one comes a second after it has changed."""
        came = FollowingNotes(Home(self.home, needs_source=False), STREAM).document(CATALOG)
        if came is None:
            return {}
        with contextlib.closing(sqlite3.connect(":memory:")) as catalog:
            catalog.deserialize(zlib.decompress(came))
            return dict(catalog.execute("SELECT name, state FROM tables"))

    def bytes_of_log(self) -> dict[str, bytes]:
        """The log's files as they are: without marks, room for what comes, and segments that have nothing yet."""
        folder = self.home / "data" / "wal" / STREAM
        found = {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.glob("*/*.wal"))}
        return {name: data.rstrip(b"\0") for name, data in found.items() if any(data[SEGMENT_HEADER_SIZE:])}


@contextlib.contextmanager
def nodes(
    folder: Path, names: str = "ab", *, acks: str = "local", more: str = "", stream: str = ""
) -> Iterator[list[Node]]:
    """Nodes that know of each other; whatever they run is killed at the end.

    Args:
        folder: where their homes go.
        names: a letter a node.
        acks: the stream's level.
        more: what else `[replication]` has.
        stream: what else the stream has.
    """
    ports = {name: free_port() for name in names}
    made = [Node(folder / name, name, ports, acks=acks, more=more, stream=stream) for name in names]
    try:
        yield made
    finally:
        for node in made:
            node.kill()


def eventually(condition: Any, what: str, *of: Node) -> None:
    """Wait until it holds; what the nodes have said is told where it doesn't come to that."""
    wait_for(
        condition,
        what=lambda: (
            what
            + "".join(
                f"\n--- {n.name} {part}\n{n.log(part)[-3000:]}"
                for n in of
                for part in ("owner", "serve", "follow", "run")
            )
        ),
    )

"""Several homes as nodes of one stream that applications write, each with its own owner, server and follower."""

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
from millstream.nodes.follower_state import FollowerState
from millstream.testing._servers.ports import free_port
from millstream.wal.reader import StreamReader

STREAM: Final = "shop"


class Node:
    """One home, and its processes by name. `start` and `kill` may be called any number of times."""

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
            folder: where the home goes.
            name: the node's name.
            ports: the Flight port of each node.
            acks: the stream's acknowledgement level.
            more: further lines of `[replication]`.
            stream: further lines of the stream.
            others: the ports at which it reaches other nodes, if they differ.
            http: its port for HTTP; 0: any.
            network: the file of the network namespace in which its processes run; empty: this process's.
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
        """Start one of its processes: `owner`, `serve`, `follow`, or `run` with all of them and the pipeline.

        Further words go to the command.
        """
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
        """SIGKILL all its processes."""
        for part in list(self._processes):
            self.end(part, signal.SIGKILL)

    def runs(self, part: str) -> bool:
        """Return whether the process runs."""
        return part in self._processes and self._processes[part].poll() is None

    def parts(self) -> list[str]:
        """Return the processes that were started and not ended by `end`; they run, or have ended on their own."""
        return sorted(self._processes)

    def signal(self, part: str, how: signal.Signals) -> None:
        """Send it a signal."""
        self._processes[part].send_signal(how)

    def log(self, part: str) -> str:
        """Return a process's output."""
        with contextlib.suppress(FileNotFoundError):
            return (self.home / f"{part}.log").read_text()
        return ""

    def is_there(self) -> bool:
        """Return whether other nodes can ask it for the leader."""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1):
            return True
        return False

    def url(self) -> str:
        """Return the address of its HTTP; empty until it listens."""
        found = re.findall(r"listening \(address ([\d.:]+)[,)]", self.log("serve"))
        return f"http://{found[-1]}" if found else ""

    def ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return run(self.home, *words, network=self._network)

    def answer(self, *words: str) -> Any:
        """Return the output of a command with `--json`; it has to succeed."""
        done = self.ask(*words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def rows(self, column: str = "id", *, durable: bool = False) -> list[Any]:
        """Return a column of all records, in the log's order.

        Empty if there is no log so far, or if the log is just being cut back to its leader's.

        Args:
            column: its name.
            durable: also return records that readers aren't shown until other nodes are known to hold them.
        """
        folder = self.home / "data" / "wal" / STREAM
        if not folder.is_dir():
            return []
        reader = StreamReader(str(folder), durable=durable)
        found: list[Any] = []
        # A former leader is cut back when it follows: a file may vanish while it is read.
        try:
            for some in reader.read_between(Seq(reader.first_seq() - 1), reader.persisted_upto()):
                found += some.batch.column(column).to_pylist()
        except (LogError, LogTruncated, OffsetExpired):
            return []
        return found

    def tables_that_came(self) -> dict[str, str]:
        """Return each table's state in the newest catalog from the leader, which sends it a second after a change."""
        came = FollowerState(Home(self.home, needs_source=False), STREAM).document(CATALOG)
        if came is None:
            return {}
        with contextlib.closing(sqlite3.connect(":memory:")) as catalog:
            catalog.deserialize(zlib.decompress(came))
            return dict(catalog.execute("SELECT name, state FROM tables"))

    def bytes_of_log(self) -> dict[str, bytes]:
        """Return the log's files without marks, preallocated space and segments that are still empty."""
        folder = self.home / "data" / "wal" / STREAM
        found = {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.glob("*/*.wal"))}
        return {name: data.rstrip(b"\0") for name, data in found.items() if any(data[SEGMENT_HEADER_SIZE:])}


@contextlib.contextmanager
def nodes(
    folder: Path, names: str = "ab", *, acks: str = "local", more: str = "", stream: str = ""
) -> Iterator[list[Node]]:
    """Make nodes that know of each other; kill all their processes at the end.

    Args:
        folder: where their homes go.
        names: a letter for each node.
        acks: the stream's acknowledgement level.
        more: further lines of `[replication]`.
        stream: further lines of the stream.
    """
    ports = {name: free_port() for name in names}
    made = [Node(folder / name, name, ports, acks=acks, more=more, stream=stream) for name in names]
    try:
        yield made
    finally:
        for node in made:
            node.kill()


def eventually(condition: Any, what: str, *of: Node) -> None:
    """Wait until the condition holds; if it doesn't in time, fail with the nodes' output."""
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

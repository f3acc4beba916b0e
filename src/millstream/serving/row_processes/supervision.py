"""`serve` in several processes: listening sockets that outlive each of them, and one supervisor."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import structlog

from millstream.errors import error_of
from millstream.processes.listening import listen
from millstream.processes.role_locks import LOCK_PATIENCE_S, RoleLock
from millstream.processes.run import part_command
from millstream.processes.supervisor import Event, SupervisedProcess, Supervisor
from millstream.serving.bind_check import check_protected
from millstream.serving.row_processes.server_process import ServerProcess
from millstream.serving.row_processes.shared_totals import SharedTotals, make_file

if TYPE_CHECKING:
    from millstream.home.home import Home
    from millstream.processes.child_process import Lifeline

logger = structlog.get_logger("millstream.serve")


def serve_in_processes(home: Home, lifeline: Lifeline, *, log_format: str) -> None:
    """Run `[http] processes` processes that serve the home on one port, until told to stop.

    After an earlier stop no port is opened. A process that dies is started again. Its socket stays open, so that connections wait for it.

    Raises:
        HomeBusy, MillstreamError (`address_in_use`), AccessError …: as `serve_home`, from the first process.
    """
    http = home.config.http
    home.prepare()
    check_protected("http", http.address, http)
    # Released at once: the first process takes it.
    RoleLock.take(home.run_folder, "serve", patience_s=LOCK_PATIENCE_S if lifeline.supervised else 0.5).release()
    if lifeline.stop.is_set():
        return
    with ExitStack() as opened:
        listeners = [opened.enter_context(one) for one in listen_together(*http.address, http.processes)]
        file = make_file(http.processes)
        opened.callback(os.close, file)
        totals = SharedTotals(file, http.processes)
        names = [_name(number) for number in range(1, http.processes + 1)]
        parts = []
        for number, (name, listener) in enumerate(zip(names, listeners, strict=True), 1):
            process = ServerProcess(number, http.processes, listener.fileno(), file)
            parts.append(
                SupervisedProcess(
                    name,
                    part_command(home, "serve", "--log-format", log_format),
                    descriptors=[listener.fileno(), file],
                    environment=process.environment(),
                )
            )
        failed: list[dict[str, Any]] = []

        def heard(event: Event) -> None:
            name, what, facts = event
            if what == "listening":
                lifeline.tell(what, facts)
            if what in {"died", "given_up", "ended"}:
                totals.clear(names.index(name))
            if what not in {"died", "given_up"}:
                return
            error = facts if what == "given_up" else facts["error"]
            is_hopeless = what == "given_up" or (error and not supervisor.parts[name].has_worked and name == names[0])
            if is_hopeless:
                failed.append(error)
                supervisor.stop()
                return
            why = {key: error[key] for key in ("code", "message")} if error else {}
            ended = {key: facts[key] for key in ("exit_code", "restart_in_s")}
            logger.warning("a server process ended, and is started again", process=name, **ended, **why)

        supervisor = _Supervisor(parts, listeners, totals, on_event=heard, patience_s=http.ends_within_s)
        lifeline.on_word(supervisor.ask_to_stop)
        if lifeline.stop.is_set() or lifeline.drain.is_set():
            supervisor.ask_to_stop()
        supervisor.run()
        if failed:
            raise error_of({"hint": None, "details": {}, **failed[0]})


class _Supervisor(Supervisor):
    """Supervises processes, whose sockets are theirs alone once they are told to stop: they close them before they end."""

    def __init__(
        self,
        parts: Sequence[SupervisedProcess],
        listeners: Sequence[socket.socket],
        totals: SharedTotals,
        *,
        on_event: Callable[[Event], None],
        patience_s: float,
    ) -> None:
        super().__init__(parts, on_event=on_event, patience_s=patience_s)
        self._listeners, self._totals = listeners, totals

    def stop(self) -> None:
        """Tell all processes to drain and end."""
        # Before any of them hears of it: the first, which answers the others' requests, ends after them.
        for number, running in enumerate(self.parts.values()):
            if running.process is not None:
                self._totals.share_of("draining", number)(1)
        super().stop()
        for listener in self._listeners:
            listener.close()


def listen_together(host: str, port: int, count: int) -> list[socket.socket]:
    """Return so many sockets that listen on one port, over which the kernel spreads connections.

    Raises:
        MillstreamError (`address_in_use`): another process listens there, or it can't be listened there.
    """
    with listen(host, port) as first:  # without sharing, so that another home's server isn't joined
        port = first.getsockname()[1]
    return [listen(host, port, is_shared=True) for _ in range(count)]


def _name(number: int) -> str:
    return "serve" if number == 1 else f"serve-{number}"

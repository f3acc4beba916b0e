"""One of several server processes on a port: its number, the socket that it listens on, and the totals of all of them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Final, Self

from millstream.serving.row_processes.shared_totals import SharedTotals

if TYPE_CHECKING:
    from millstream.serving.row_processes.shared_totals import Total

_VARIABLE: Final = "MILLSTREAM_SERVER_PROCESS"


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """The facts that a server process inherits from the process that started it."""

    number: int
    """From 1: the first answers everything, the others take rows and forward the rest."""
    count: int
    listening: int
    """Descriptor of its listening socket."""
    totals: int
    """Descriptor of the file of totals."""

    @classmethod
    def inherited(cls) -> Self | None:
        """Return this process's part; None if it serves alone."""
        text = os.environ.pop(_VARIABLE, None)
        if text is None:
            return None
        found = cls(*map(int, text.split(",")))
        for descriptor in (found.listening, found.totals):
            os.set_inheritable(descriptor, False)
        return found

    def environment(self) -> dict[str, str]:
        """Return the variables by which a process inherits its part."""
        return {_VARIABLE: ",".join(map(str, astuple(self)))}

    def listener(self) -> socket.socket:
        """Return its listening socket."""
        return socket.socket(fileno=self.listening)

    def share_of(self, total: Total) -> Callable[[int], int]:
        """Return a function that publishes this process's part of a total, and returns the others' parts together."""
        return SharedTotals(self.totals, self.count).share_of(total, self.number - 1)

"""A part's side of supervision: it receives `stop` and `drain`, reports facts, and ends when its supervisor has gone.

If an operator starts the same process, it is unsupervised: signals stop it, and it reports to no process.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

from millstream.errors import MillstreamError, Retry
from millstream.processes.supervisor import REPORT_VARIABLE
from millstream.workers import Worker

_PR_SET_PDEATHSIG: Final = 1


class Lifeline:
    """A part's channel to its supervisor, in both directions.

    `stop` is set by that word, by SIGTERM and by SIGINT; `drain` by its word only. Facts may be reported
    from any thread.
    """

    def __init__(self) -> None:
        self.stop: Final = threading.Event()
        self.drain: Final = threading.Event()
        self._lock = threading.Lock()
        descriptor = os.environ.pop(REPORT_VARIABLE, None)
        self._tell = None if descriptor is None else int(descriptor)
        self._on_word: list[Callable[[], None]] = []
        self._failure: MillstreamError | None = None

    @property
    def supervised(self) -> bool:
        """Return whether there is a supervisor."""
        return self._tell is not None

    def on_word(self, call: Callable[[], None]) -> None:
        """Call something once `stop` or `drain` is set, on the thread that received it."""
        self._on_word.append(call)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Receive and report inside the block; its error is reported before it propagates. Main thread only."""
        signals = queue.SimpleQueue[str | None]()

        def heard(number: int, frame: object) -> None:
            del number, frame
            signals.put("stop")  # not `_hear`: the interrupted thread may hold the event's lock, inside a wait

        def pass_on() -> None:
            while (word := signals.get()) is not None:
                self._hear(word)

        Worker("signals", pass_on).start()
        before = {number: signal.signal(number, heard) for number in (signal.SIGINT, signal.SIGTERM)}
        if self._tell is not None:
            os.set_inheritable(self._tell, False)
            _die_with_parent()
            Worker("lifeline", self._listen).start()
        try:
            yield
            if self._failure is not None:
                raise self._failure
        except MillstreamError as error:
            self.tell("error", {**error.as_dict(), "exit_code": error.exit_code})
            if self.supervised:
                # The supervisor reports it, so that it isn't reported twice.
                raise SystemExit(error.exit_code) from error
            raise
        except Exception as error:
            # Our bug: another process may avoid it, and a caller that waits for the work to end must
            # learn of it.
            facts = {"code": "unexpected", "message": f"{type(error).__name__}: {error}", "retry": Retry.BACKOFF.value}
            self.tell("error", facts)
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signals.put(None)

    def fail(self, error: MillstreamError) -> None:
        """End the process: set `stop`, and have `held` raise the error once its block has ended.

        From any thread; the first error counts.
        """
        if self._failure is None:
            self._failure = error
        self._hear("stop")

    def tell(self, event: str, facts: dict[str, Any]) -> None:
        """Report to the supervisor; does nothing if there is none, or if it has gone."""
        if self._tell is None:
            return
        line = json.dumps({"event": event, **facts}, default=str).encode() + b"\n"
        with self._lock, contextlib.suppress(OSError):
            while line:
                line = line[os.write(self._tell, line) :]

    def _listen(self) -> None:
        # Not through sys.stdin: its lock, held by a thread that waits, aborts the interpreter when it
        # shuts down.
        heard = b""
        while piece := os.read(0, 4096):
            *words, heard = (heard + piece).split(b"\n")
            for word in words:
                self._hear(word.decode(errors="replace"))
        # Only the supervisor's death closes the pipe. Everything durable stays so; the rest is for its
        # successor.
        os._exit(1)

    def _hear(self, word: str) -> None:
        event = {"stop": self.stop, "drain": self.drain}.get(word)
        if event is None or event.is_set():
            return
        event.set()
        for call in self._on_word:
            call()


def _die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies: also if no thread runs to see the pipe's end."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

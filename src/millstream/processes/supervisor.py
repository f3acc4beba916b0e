"""Supervision: child processes that are restarted when they die, and never outlive their supervisor.

A *part* is a process of this program. The contract between the two (the child's side is
`millstream.processes.child_process`):

- The child's standard input is a pipe that only the supervisor holds. Words on it (`stop`, `drain`) are
  commands. At its end the child exits, so a SIGKILL of the supervisor leaves no child behind.
- The child reports facts as JSON lines on a pipe of its own, the last of them being `error` or `outcome`.
- The child runs in a session of its own, so that a Ctrl-C at the terminal reaches only the supervisor,
  which lets all parts drain.

A part that dies is restarted, with a delay that doubles while it goes on dying young. A part is given up
and reported if its error can't pass without a person (`errors.may_pass`), or after too many errors
(`SupervisedProcess.errors_max`); the others go on. A part that has worked before waits for the configuration to be
right again: a restart may meet a file that is being edited.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any, Final, Literal

from millstream.backoff import Backoff
from millstream.errors import ConfigError, may_pass
from millstream.wal.files import error_of_os
from millstream.workers import Worker

REPORT_VARIABLE: Final = "MILLSTREAM_REPORT_FD"
"""In a child's environment: the descriptor on which it reports facts; its presence means that it is supervised."""

Word = Literal["stop", "drain"]


@dataclass(frozen=True, slots=True)
class SupervisedProcess:
    """A process to keep running."""

    name: str
    command: Sequence[str]
    may_end: bool = False
    """Whether an unrequested end with exit code 0 is the end of its work rather than a death."""
    errors_max: int | None = None
    """Give it up after that many deaths with a reported error, whatever the error, without progress between them
    (`Supervisor.forgive`); None: never for that. A bug of ours (`unexpected`) has one try more."""
    final_codes: frozenset[str] = frozenset()
    """Codes of errors for which it is given up at once."""
    descriptors: Sequence[int] = ()
    """Open files that it inherits, under the same numbers."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to this process's."""


class PartState(StrEnum):
    """The state of a part."""

    RUNNING = "running"
    WAITING = "waiting"
    """It died; it is restarted when its delay is over."""
    ENDED = "ended"
    """It did its work, or was told to stop."""
    GIVEN_UP = "given_up"
    """A restart isn't expected to help; see above."""


_BACKOFF: Final = Backoff(0.5, 30.0, jitter=0)
_HEALTHY_AFTER_S: Final = 60.0
"""A part that lived this long starts over with the shortest delay."""


@dataclass(slots=True)
class RunningProcess:
    """A part with its state; the supervisor's own."""

    part: SupervisedProcess
    backoff: Backoff
    state: PartState = PartState.WAITING
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    due_s: float = 0.0
    errors: int = 0
    restarts: int = 0
    has_worked: bool = False
    """Whether it has reported anything but an error."""
    word: Word | None = None
    outcome: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None

    @property
    def over(self) -> bool:
        """Return whether it won't run again."""
        return self.state in {PartState.ENDED, PartState.GIVEN_UP}


Event = tuple[str, str, dict[str, Any]]
"""(part, what, facts): `started`, `died`, `ended`, `given_up`, or the part's own report.

`stopping`, at the first signal, is an event of all parts; its part is "".
"""


class Supervisor:
    """Runs parts until all are over. Made, used and ended only by the main thread.

    Args:
        parts: the parts to run; names are unique.
        on_event: called with everything, on the main thread; may call `tell` and `stop`.
        patience_s: how long parts may drain after a stop, before they are killed.
    """

    def __init__(
        self,
        parts: Sequence[SupervisedProcess],
        *,
        on_event: Callable[[Event], None],
        backoff: Backoff = _BACKOFF,
        patience_s: float = 60.0,
    ) -> None:
        self.parts: Final = {part.name: RunningProcess(part, replace(backoff)) for part in parts}
        self._on_event = on_event
        self.patience_s: Final = patience_s
        self._inbox: queue.SimpleQueue[tuple[str, subprocess.Popen[bytes] | None, dict[str, Any] | None]]
        self._inbox = queue.SimpleQueue()
        self._kill_at_s: float | None = None
        self.interruptions = 0
        """How often SIGINT or SIGTERM came."""

    def run(self) -> None:
        """Start all parts and supervise them until none is left.

        SIGINT, SIGTERM and a terminal's end stop all parts; a second one kills them.
        """
        with self._signals():
            try:
                while not all(running.over for running in self.parts.values()):
                    self._start_what_is_due()
                    self._take_one()
                    self._kill_what_lingers()
            finally:
                self._kill_all()

    def tell(self, name: str, word: Word) -> None:
        """Send a word to a part; a restarted part receives it again."""
        running = self.parts[name]
        if running.word == "stop":
            return
        running.word = word
        if running.state is PartState.WAITING and word == "stop":
            running.state = PartState.ENDED
        elif running.process is not None:
            _say(running.process, word)

    def forgive(self, name: str) -> None:
        """Count a part's errors from 0 again: it has made progress. A long life alone is none."""
        self.parts[name].errors = 0

    def ask_to_stop(self) -> None:
        """Have the main thread call `stop`; from any thread."""
        self._inbox.put(("", None, {}))

    def stop(self) -> None:
        """Tell all parts to drain and end."""
        if self._kill_at_s is None:
            self._kill_at_s = time.monotonic() + self.patience_s
        for name, running in self.parts.items():
            if not running.over:
                self.tell(name, "stop")

    # --- steps

    def _start_what_is_due(self) -> None:
        for running in self.parts.values():
            if running.state is PartState.WAITING and time.monotonic() >= running.due_s:
                self._start(running)

    def _start(self, running: RunningProcess) -> None:
        running.started_s = time.monotonic()
        running.error, running.outcome = None, {}
        try:
            process, listen = _open(running.part)
        except OSError as error:
            running.error = error_of_os(error).as_dict()
            self._ended(running, None)
            return
        running.process, running.state = process, PartState.RUNNING
        Worker(f"hears-{running.part.name}", partial(self._listen, running.part.name, process, listen)).start()
        self._on_event((running.part.name, "started", {"pid": process.pid, "restarts": running.restarts}))
        if running.word is not None:
            _say(process, running.word)

    def _listen(self, name: str, process: subprocess.Popen[bytes], descriptor: int) -> None:
        with os.fdopen(descriptor, "rb") as lines:
            for line in lines:
                with contextlib.suppress(ValueError):
                    facts = json.loads(line)
                    if isinstance(facts, dict):
                        self._inbox.put((name, process, facts))
        process.wait()
        self._inbox.put((name, process, None))

    def _take_one(self) -> None:
        if all(running.over for running in self.parts.values()):
            return
        due = [r.due_s for r in self.parts.values() if r.state is PartState.WAITING]
        if self._kill_at_s is not None:
            due.append(self._kill_at_s)
        wait_s = max(0.0, min(due) - time.monotonic()) if due else None
        try:
            name, process, facts = self._inbox.get(timeout=wait_s)
        except queue.Empty:
            return
        if not name:
            if facts is None:
                self._interrupted()
            else:
                self.stop()
            return
        running = self.parts[name]
        if process is not running.process:
            return
        if facts is None:
            self._died(running)
            return
        what = str(facts.pop("event", "told"))
        if what == "error":
            running.error = facts
        else:
            running.has_worked = True
        if what == "outcome":
            running.outcome = facts
        self._on_event((name, what, facts))

    def _died(self, running: RunningProcess) -> None:
        process = running.process
        assert process is not None
        assert process.stdin is not None
        running.process = None
        with contextlib.suppress(OSError):
            process.stdin.close()
        self._ended(running, process.returncode)

    def _ended(self, running: RunningProcess, exit_code: int | None) -> None:
        """Decide whether a part is restarted; it has no exit code if it couldn't be started."""
        facts = {"exit_code": exit_code}
        if time.monotonic() - running.started_s >= _HEALTHY_AFTER_S:
            running.backoff.reset()
        if exit_code == 0 and (running.word is not None or running.part.may_end):
            self._over(running, PartState.ENDED, facts)
        elif running.error is not None and self._is_hopeless(running, running.error):
            self._over(running, PartState.GIVEN_UP, running.error)
        elif running.word == "stop":
            self._over(running, PartState.ENDED, facts)
        else:
            running.restarts += 1
            delay_s = running.backoff.next_s()
            running.state, running.due_s = PartState.WAITING, time.monotonic() + delay_s
            self._on_event((running.part.name, "died", {**facts, "restart_in_s": delay_s, "error": running.error}))

    def _is_hopeless(self, running: RunningProcess, error: dict[str, Any]) -> bool:
        running.errors += 1
        most, code, retry = running.part.errors_max, error.get("code"), error.get("retry")
        if most is not None and code == "unexpected":
            most += 1
        is_edited = code == ConfigError.code and running.has_worked
        is_refused = retry in {"operator", "never"} and not may_pass(code, retry) and not is_edited
        is_final = is_refused or code in running.part.final_codes
        return is_final or (most is not None and running.errors >= most)

    def _over(self, running: RunningProcess, state: PartState, facts: dict[str, Any]) -> None:
        running.state = state
        self._on_event((running.part.name, state.value, facts))

    def _interrupted(self) -> None:
        self.interruptions += 1
        if self.interruptions == 1:
            self._on_event(("", "stopping", {}))
            self.stop()
        else:
            self._kill_at_s = time.monotonic()

    def _kill_what_lingers(self) -> None:
        if self._kill_at_s is not None and time.monotonic() >= self._kill_at_s:
            for running in self.parts.values():
                if running.process is not None:
                    running.process.kill()
            self._kill_at_s = time.monotonic() + 1.0  # a kill takes a moment to be seen

    def _kill_all(self) -> None:
        for running in self.parts.values():
            if running.process is not None:
                running.process.kill()
                running.process.wait()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def heard(number: int, frame: object) -> None:
            del number, frame
            self._inbox.put(("", None, None))

        # SIGCHLD needs no handler: a part's end closes its pipe.
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup means it
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, heard) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _open(part: SupervisedProcess) -> tuple[subprocess.Popen[bytes], int]:
    """Start a part's process; return it with the descriptor from which its reports are read."""
    listen, tell = os.pipe()
    try:
        process = subprocess.Popen(
            [*part.command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[tell, *part.descriptors],
            env={**os.environ, **part.environment, REPORT_VARIABLE: str(tell)},
            start_new_session=True,
        )
    except BaseException:
        os.close(listen)
        raise
    finally:
        os.close(tell)
    return process, listen


def _say(process: subprocess.Popen[bytes], word: Word) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it is dying: it receives the word when it is restarted
        process.stdin.write(word.encode() + b"\n")
        process.stdin.flush()

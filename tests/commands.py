"""`millstream` in processes that start at once: each is forked from a process that has imported what commands import.

A command takes more than a second of a core to start, nearly all of it for imports, and the suite runs
hundreds. A forked command is a process like any other: it has a number, an environment, descriptors and locks
of its own, and signals reach it. Only a fresh process can show what a command imports, how much memory it takes
and where its machine code lies. Tests of these start one: `tests/cli/test_main.py` asks each command for its
help that way, and `millstream run` starts its parts that way.

`python -m tests.commands DESCRIPTOR` is the process that commands are forked from. It ends with the process
that started it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, NoReturn, Self

_MESSAGE_BYTES: Final = 1 << 20
"""Largest size of a request: the words of a command, and its environment."""
_STATUS: Final = struct.Struct("i")
_BEGINS_WITHIN_S: Final = 300.0
"""Time limit for a command's start: the first one waits for all imports."""
_NOT_IMPORTED: Final = "millstream.catalog.migrations", "millstream.spark", "millstream.testing"
"""Packages that no command imports in its own process, and the migrations that alembic runs."""
_ELSE: Final = (
    "alembic.command",
    "asyncio",
    "concurrent.futures.thread",
    "rich.console",
    "rich.table",
    "uvloop",
)
"""Modules that commands' imports load on first use."""
_READ_AT_START: Final = "PYTHON", "NUMBA_", "LD_", "LC_"
"""Prefixes of variables that the interpreter or an imported library reads at its start."""

MILLSTREAM: Final = "millstream.cli.main:main"
SCRIPT: Final = "tests.commands:script"
"""Entry point for a program's text and its arguments, as in `python -c`."""


class Command:
    """`millstream WORD…` with the interface of `subprocess.Popen`, as far as tests use it.

    Args:
        words: the arguments of `millstream`.
        stdin: a descriptor, `subprocess.PIPE` or `DEVNULL`; if None, the test's own.
        stdout: the same.
        stderr: the same, or `subprocess.STDOUT`.
        text: pipes carry text, not bytes.
        env: its environment; if None, this process's.
        is_taken_down: its interpreter ends module by module, as that of `python -m millstream.cli` does.
            That takes longer than most commands do, so commands that run to their end skip it: by then their
            threads, exit handlers and output have ended too.
        begins: the function, as `module:function`, that takes the words, if it isn't that of the commands.
            It never returns, or ends well.
        network: the file of the network namespace in which it runs; empty: this process's.

    Concurrency: as of `Popen`: any thread may ask whether it runs, or end it.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        stdin: IO[Any] | int | None = None,
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | int | None = None,
        text: bool = False,
        env: Mapping[str, str] | None = None,
        is_taken_down: bool = True,
        begins: str = MILLSTREAM,
        network: str = "",
    ) -> None:
        self.args: Final = [*words]
        self.stdin: IO[Any] | None = None
        self.stdout: IO[Any] | None = None
        self.stderr: IO[Any] | None = None
        self.returncode: int | None = None
        self._lock: Final = threading.Lock()
        environ = dict(os.environ if env is None else env)
        changed = [name for name in {*environ, *os.environ} if environ.get(name) != os.environ.get(name)]
        late = [name for name in changed if name.startswith(_READ_AT_START)]
        assert not late, f"{late} are read when an interpreter begins: start `python -m millstream.cli` for that"
        with contextlib.ExitStack() as ends:
            taken: list[int] = []
            for number, (name, given) in enumerate((("stdin", stdin), ("stdout", stdout), ("stderr", stderr))):
                if given == subprocess.PIPE:
                    reading, writing = os.pipe()
                    its, own, mode = (reading, writing, "w") if number == 0 else (writing, reading, "r")
                    ends.callback(os.close, its)
                    setattr(self, name, os.fdopen(own, mode if text else f"{mode}b"))
                elif given == subprocess.DEVNULL:
                    its = os.open(os.devnull, os.O_RDWR)
                    ends.callback(os.close, its)
                elif given == subprocess.STDOUT:
                    its = taken[1]
                elif given is None:
                    its = number
                else:
                    its = given if isinstance(given, int) else given.fileno()
                taken.append(its)
            self._told, tells = os.pipe()
            ends.callback(os.close, tells)
            _source().ask(_Asked(self.args, environ, str(Path.cwd()), begins, network, is_taken_down), [*taken, tells])
        pid = self._hear(_BEGINS_WITHIN_S)
        assert pid, f"{self.args} didn't begin within {_BEGINS_WITHIN_S} s"
        self.pid: Final = pid

    def _hear(self, within_s: float | None) -> int | None:
        """Return its next number: first its process id, then its exit code. None if nothing comes in time."""
        if not select.select([self._told], [], [], within_s)[0]:
            return None
        told = os.read(self._told, _STATUS.size)
        assert told, "what commands are forked from has ended"
        return int(_STATUS.unpack(told)[0])

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        with self._lock:
            if self.returncode is None and (code := self._hear(0)) is not None:
                self._ended(code)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code, once it has ended. Raises `subprocess.TimeoutExpired`."""
        until_s = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left_s = None if until_s is None else until_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            with contextlib.suppress(OSError, ValueError):  # another thread has received it
                # Look now and then, so that a thread that reads the exit code first leaves no other waiting.
                select.select([self._told], [], [], 0.5 if left_s is None else min(0.5, left_s))
        assert self.returncode is not None
        return self.returncode

    def _ended(self, code: int) -> None:
        self.returncode = code
        os.close(self._told)
        self._told = -1

    def send_signal(self, number: int) -> None:
        """Send it a signal if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, given: Any = None, timeout: float | None = None) -> tuple[Any, Any]:
        """Write its input, wait until it has ended, and return its output. Raises `subprocess.TimeoutExpired`."""
        came: dict[IO[Any], Any] = {}

        def hand_in(pipe: IO[Any]) -> None:
            with contextlib.suppress(BrokenPipeError), pipe:
                if given:
                    pipe.write(given)

        def take(pipe: IO[Any]) -> None:
            came[pipe] = pipe.read()
            pipe.close()

        until_s = None if timeout is None else time.monotonic() + timeout
        moving = [
            threading.Thread(target=take, args=(pipe,), daemon=True) for pipe in (self.stdout, self.stderr) if pipe
        ]
        if self.stdin and not self.stdin.closed:
            moving.append(threading.Thread(target=hand_in, args=(self.stdin,), daemon=True))
        for thread in moving:
            thread.start()
        for thread in moving:
            thread.join(None if until_s is None else max(0.0, until_s - time.monotonic()))
        if any(thread.is_alive() for thread in moving):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if until_s is None else max(0.0, until_s - time.monotonic()))
        return came.get(self.stdout) if self.stdout else None, came.get(self.stderr) if self.stderr else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in (self.stdout, self.stderr, self.stdin):
            if pipe:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self.wait()


def run_command(
    words: Sequence[str],
    *,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
    timeout: float = 600.0,
    begins: str = MILLSTREAM,
    network: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return its output; kill it at the time limit. Raises `subprocess.TimeoutExpired`."""
    command = Command(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        is_taken_down=False, begins=begins, network=network,
    )  # fmt: skip
    try:
        output, errors = command.communicate(stdin, timeout=timeout)
    except BaseException:
        command.kill()
        raise
    assert command.returncode is not None
    return subprocess.CompletedProcess(command.args, command.returncode, output, errors)


class _Source:
    """The test's side of the process that commands are forked from."""

    def __init__(self) -> None:
        self._channel, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.commands", str(its.fileno())],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._lock = threading.Lock()
        atexit.register(self._end)

    def ask(self, what: _Asked, descriptors: list[int]) -> None:
        """Start a command."""
        with self._lock:
            socket.send_fds(self._channel, [json.dumps(asdict(what)).encode()], descriptors)

    def _end(self) -> None:
        self._channel.close()
        self._process.wait(60)


@functools.cache
def _source() -> _Source:
    return _Source()


@dataclass(frozen=True, slots=True)
class _Asked:
    """A command to run."""

    words: list[str]
    environ: dict[str, str]
    folder: str
    begins: str
    network: str
    is_taken_down: bool


def _forked(channel: socket.socket) -> _Asked | None:
    """Fork a process for each request. Return the request in the fork, and None in the parent once requests end."""
    woken, wakes = os.pipe()
    for descriptor in (woken, wakes):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test, which ends its commands
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    running: dict[int, int] = {}
    while True:
        ready = select.select([channel.fileno(), woken], [], [])[0]
        if woken in ready:
            os.read(woken, 1 << 16)
            for pid, tells in list(running.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del running[pid]
                    _tell(tells, os.waitstatus_to_exitcode(status))
                    os.close(tells)
        if channel.fileno() in ready:
            message, descriptors, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, 4)
            if not message:
                return None
            tells = descriptors.pop()
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for number, descriptor in enumerate(descriptors):
                    os.dup2(descriptor, number)
                for descriptor in (*descriptors, tells, woken, wakes, *running.values()):
                    os.close(descriptor)
                return _Asked(**json.loads(message))
            running[pid] = tells
            _tell(tells, pid)
            for descriptor in descriptors:
                os.close(descriptor)


def _tell(descriptor: int, value: int) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(descriptor, _STATUS.pack(value))


def _run(asked: _Asked) -> NoReturn:
    """Set its environment, and the settings that were read from another one at the import; then run."""
    from millstream import failpoints

    if asked.network:
        _enter(asked.network)
    os.chdir(asked.folder)
    os.environ.clear()
    os.environ.update(asked.environ)
    time.tzset()
    failpoints._left.update(failpoints._parse(asked.environ.get(failpoints.VARIABLE, "")))
    module, _, name = asked.begins.partition(":")
    try:
        getattr(importlib.import_module(module), name)(asked.words)
        sys.exit(0)
    except SystemExit as ended:
        if asked.is_taken_down:
            raise
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for said in (sys.stdout, sys.stderr):
            said.flush()
        os._exit(ended.code if isinstance(ended.code, int) else 1)


def _enter(network: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(network).open("rb") as namespace:
        if libc.setns(namespace.fileno(), 0x40000000):  # CLONE_NEWNET; os.setns comes with Python 3.12
            raise OSError(ctypes.get_errno(), "can't enter the network", network)


def _import_all() -> None:
    import millstream

    (folder,) = millstream.__path__
    for file in sorted(Path(folder).rglob("*.py")):
        name = ".".join(("millstream", *file.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__")
        if not name.startswith(_NOT_IMPORTED) and file.stem != "__main__":
            importlib.import_module(name)
    for name in _ELSE:
        importlib.import_module(name)


def script(words: list[str]) -> None:
    """Run a program's text, with arguments."""
    text, *arguments = words
    sys.argv = ["-c", *arguments]
    exec(compile(text, "<script>", "exec"), {"__name__": "__main__"})


def main(descriptor: int) -> None:
    """Import everything, then fork for each request until the requester is gone; in a fork, run the command."""
    with socket.socket(fileno=descriptor) as channel:
        gc.disable()
        _import_all()
        gc.freeze()
        gc.enable()
        asked = _forked(channel)
    if asked is not None:
        _run(asked)


if __name__ == "__main__":
    main(int(sys.argv[1]))

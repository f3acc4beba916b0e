"""A command as a push sink: it is started for each batch and reads the messages from its standard input.

Each message is a line of JSON, and the input ends behind the last one. The command acknowledges the batch by a line `ok`
on its standard output, and by the exit status 0.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Final

from millstream.delivery.sink_settings import SinkSettings
from millstream.delivery.sinks import ACCEPTED, Outcome, Pacing, PushMessage, failed
from millstream.model.addresses import mask_words

_KNOWN: Final = ("argv", "batch_size", "timeout")
_OUTPUT_BYTES: Final = 64 << 10
"""Bytes of its outputs that are kept: the first of stdout, the last of stderr."""
_PIECE_BYTES: Final = 64 << 10
_LOOK_S: Final = 0.05
_SHOWN: Final = 200


@dataclass(frozen=True, slots=True)
class CommandSettings:
    """Valid settings, with their defaults. Made by `parse`."""

    argv: tuple[str, ...]
    """The program and its arguments. No shell reads them."""
    batch_size: int
    timeout_s: float

    @classmethod
    def parse(cls, settings: object) -> CommandSettings:
        """Read settings.

        Raises:
            DeliveryError (`invalid_consumer`): a setting is missing, unknown or not valid.
        """
        fields = SinkSettings("command", settings, _KNOWN)
        argv = fields.value("argv")
        valid = isinstance(argv, list | tuple) and all(isinstance(word, str) and "\0" not in word for word in argv)
        if not valid or not argv or not argv[0]:
            fields.refuse(
                "argv", "isn't a list of texts", 'Write the program and its arguments: ["python", "load.py"].'
            )
        batch_size = fields.whole("batch_size", 100, 1, 1000)
        return cls(tuple(argv), batch_size, fields.seconds("timeout", "30s", "1h"))

    def as_dict(self, *, masked: bool = True) -> dict[str, Any]:
        """Return every setting; `parse` reads it again.

        Args:
            masked: whether words are replaced by `***` that an option's name or their form tells to be secret.
        """
        argv = mask_words(self.argv) if masked else list(self.argv)
        return {"argv": argv, "batch_size": self.batch_size, "timeout": f"{self.timeout_s:g}s"}


class CommandSink:
    """A command: `sinks.PushSink`.

    Args:
        settings: the settings.
    """

    def __init__(self, settings: CommandSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        """Held while the field below changes."""
        self._running: _Run | None = None
        self._is_closed = False

    @property
    def pacing(self) -> Pacing:
        """See `sinks.PushSink`."""
        return Pacing(batch_size=self._settings.batch_size, timeout_s=self._settings.timeout_s)

    def deliver(self, messages: Sequence[PushMessage]) -> Outcome:
        """See `sinks.PushSink`: one run of the command."""
        data = b"".join(message.json + b"\n" for message in messages)
        with self._lock:
            if self._is_closed:
                return failed("the sink is closed")
            try:
                run = self._running = _Run(self._settings.argv)
            except OSError as error:
                return failed(f"the command {self._settings.argv[0]} can't be started: {error.strerror or error}")
        try:
            return run.outcome(data, self._settings.timeout_s)
        finally:
            run.end()
            with self._lock:
                self._running = None

    def close(self) -> None:
        """See `sinks.PushSink`: a running command is killed."""
        with self._lock:
            self._is_closed = True
            if self._running is not None:
                self._running.kill()


class _Run:
    """One run of the command, in a process group of its own."""

    def __init__(self, argv: Sequence[str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, bufsize=0)
        self._output, self._errors = b"", b""

    def outcome(self, data: bytes, timeout_s: float) -> Outcome:
        """Feed the command and return the outcome, once it has ended."""
        if not self._exchange(memoryview(data), time.monotonic() + timeout_s):
            return failed(f"the command didn't end within {timeout_s:g} s")
        status = self._process.wait()
        lines = [line.strip() for line in self._output.splitlines() if line.strip()]
        if status == 0 and lines and all(line == b"ok" for line in lines):
            return ACCEPTED
        if status:
            problem = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        elif not lines:
            problem = "ended without the line ok"
        else:
            other = next(line for line in lines if line != b"ok")
            problem = f"answered {other.decode(errors='replace')[:_SHOWN]!r} instead of ok"
        last = self._errors.decode(errors="replace").strip().splitlines()[-1:]
        return failed(f"the command {problem}" + (f": {last[0].strip()[:_SHOWN]}" if last else ""))

    def kill(self) -> None:
        """Kill the command and its children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill what is left of it, and release it."""
        self.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _exchange(self, left: memoryview, deadline_s: float) -> bool:
        """Write its input and read its outputs until it has ended; return False if the time is over first."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        os.set_blocking(process.stdin.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdin, selectors.EVENT_WRITE)
            selector.register(process.stdout, selectors.EVENT_READ)
            selector.register(process.stderr, selectors.EVENT_READ)
            while True:
                has_ended = process.poll() is not None
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                ready = selector.select(0 if has_ended else min(left_s, _LOOK_S)) if selector.get_map() else []
                has_read = False
                for key, _ in ready:
                    if key.fileobj is process.stdin:
                        left = self._write(selector, process.stdin, left)
                    else:
                        has_read = self._read(selector, key.fileobj) or has_read
                if has_ended and not has_read:
                    return True
                if not selector.get_map() and not has_ended:
                    time.sleep(_LOOK_S / 10)  # it has closed everything and is about to end

    def _write(self, selector: selectors.BaseSelector, stdin: IO[bytes], left: memoryview) -> memoryview:
        with contextlib.suppress(BlockingIOError):
            try:
                left = left[os.write(stdin.fileno(), left[:_PIECE_BYTES]) :]
            except BrokenPipeError:
                left = left[:0]  # it reads no more; its answer counts
        if not left:
            selector.unregister(stdin)
            stdin.close()
        return left

    def _read(self, selector: selectors.BaseSelector, stream: Any) -> bool:
        data = os.read(stream.fileno(), _PIECE_BYTES)
        if not data:
            selector.unregister(stream)
        elif stream is self._process.stdout:
            self._output = (self._output + data)[:_OUTPUT_BYTES]
        else:
            self._errors = (self._errors + data)[-_OUTPUT_BYTES:]
        return bool(data)


def open_command(settings: Mapping[str, Any], *, stream: str, consumer: str) -> CommandSink:  # noqa: ARG001
    """Return a sink. This function is a `sinks.SinkFactory`."""
    return CommandSink(CommandSettings.parse(settings))

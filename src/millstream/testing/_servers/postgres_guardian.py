"""The process between us and an embedded PostgreSQL: it starts the postmaster and never outlives its starter.

It runs as a script of its own, in a session of its own (so that Ctrl-C on a terminal doesn't reach the
server). It takes one JSON line on stdin and answers `started PID` or `failed REASON`. Then it obeys the
lines `smart`, `fast`, `immediate`, `kill` until the server is gone, and answers `exited CODE`.

When stdin closes, or its parent changes, its starter is gone: it stops the server at once and removes its
temporary folder. Only the postmaster's parent can signal it by an id that can't have been given to
another process. Only the standard library is imported, because start-up time counts.
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

_SIGNALS = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
    "kill": signal.SIGKILL,
}
_POLL_S = 0.5  # between two looks at the parent's id; a command, the pipe's end and the server's end are seen at once
_GRACE_S = 10.0  # for an orphaned server to stop on SIGQUIT, before it's killed
_PR_SET_PDEATHSIG = 1


def _die_with_guardian() -> Callable[[], None] | None:
    """Have the Linux kernel end the postmaster when this process is killed; elsewhere only the pipe does."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl

    def ask_kernel() -> None:
        # Runs after setuid (which would clear it) and before exec. This process has one thread: a
        # preexec_fn is safe.
        prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)

    return ask_kernel


def _start(spec: dict[str, Any]) -> "subprocess.Popen[bytes]":
    identity = {} if spec["uid"] is None else {"user": spec["uid"], "group": spec["gid"], "extra_groups": []}
    with open(spec["log_file"], "ab") as output:
        return subprocess.Popen(
            spec["command"],
            cwd=spec["cwd"],
            env=spec["env"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=_die_with_guardian(),  # noqa: PLW1509 - this process has one thread
            **identity,
        )


def _say(text: str) -> None:
    # The starter may be gone: then no process reads the answer.
    with contextlib.suppress(OSError):
        os.write(1, text.encode() + b"\n")


def _end_orphan(server: "subprocess.Popen[bytes]", folder: str | None) -> None:
    server.send_signal(signal.SIGQUIT)
    try:
        server.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    if folder is not None:
        time.sleep(0.1)  # backends of a killed postmaster notice within moments; their late files can stay
        shutil.rmtree(folder, ignore_errors=True)


def _read_spec() -> tuple[dict[str, Any], bytes]:
    data = b""
    while b"\n" not in data:
        chunk = os.read(0, 65536)
        if not chunk:
            raise SystemExit(1)
        data += chunk
    line, rest = data.split(b"\n", 1)
    spec: dict[str, Any] = json.loads(line)
    return spec, rest


def main() -> None:
    """Start the server that stdin describes, and serve until it has ended."""
    parent = os.getppid()
    spec, pending = _read_spec()
    ended, noted = os.pipe()
    os.set_blocking(ended, False)
    os.set_blocking(noted, False)
    signal.set_wakeup_fd(noted)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        server = _start(spec)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        _say(f"failed {error}")
        return
    _say(f"started {server.pid}")
    while server.poll() is None:
        orphaned = os.getppid() != parent
        # A forked child of the starter may hold the pipe open after the starter's end: hence the check of
        # the parent's id.
        readable = [] if orphaned else select.select([0, ended], [], [], _POLL_S)[0]
        if ended in readable:
            os.read(ended, 4096)
        if 0 in readable:
            chunk = os.read(0, 4096)
            orphaned = not chunk
            pending += chunk
        if orphaned:
            _end_orphan(server, spec["remove"])
            return
        *lines, pending = pending.split(b"\n")
        for line in lines:
            server.send_signal(_SIGNALS[line.decode()])
    _say(f"exited {server.returncode}")


if __name__ == "__main__":
    main()

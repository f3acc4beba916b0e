"""Who runs what of a home: one process a role, held by flock, so that the kernel lets go when the process dies."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any, Final, Literal, Self

from millstream.errors import HomeBusy

Role = Literal["run", "owner", "pipeline", "serve", "replay"]
"""`run`: the supervisor. `owner`: capture, the streams' writer. `pipeline`: the Spark driver. `serve`: HTTP. `replay`: writes a
range of records into a table of its own."""

_WORDS: Final[dict[str, str]] = {
    "run": "`millstream run`",
    "owner": "`millstream capture run`",
    "pipeline": "`millstream pipeline run`",
    "serve": "`millstream serve`",
    "replay": "`millstream pipeline replay`",
}
_POLL_S: Final = 0.1


class RoleLock:
    """A role of a home, held from `take` until `release` or the process's end. Not for sharing between threads."""

    def __init__(self, file: Path, descriptor: int) -> None:
        self._file = file
        self._descriptor = descriptor

    @classmethod
    def take(cls, run_folder: Path, role: Role, *, patience_s: float = 0.5) -> RoleLock:
        """Take a role and write down who has it.

        Args:
            run_folder: the home's `data/run`; it exists.
            role: which.
            patience_s: how long to wait for one who is just leaving (or for `holder`, which looks for a moment).

        Raises:
            HomeBusy: another process has it; details: pid, role.
        """
        file = run_folder / f"{role}.lock"
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(descriptor)
                    pid = holder(run_folder, role).get("pid")
                    raise HomeBusy(
                        f"{_WORDS[role]} of process {pid or 'unknown'} has {run_folder.parent.parent}",
                        pid=pid,
                        role=role,
                    ) from None
                time.sleep(_POLL_S)
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same, and nobody reads who has it
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "since": time.time()}).encode(), 0)
        return cls(file, descriptor)

    def release(self) -> None:
        """Give the role back; calling it again does nothing."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def holder(run_folder: Path, role: Role) -> dict[str, Any]:
    """Who has a role now: `pid` and `since`; empty where nobody has. Takes nothing away from anybody."""
    try:
        descriptor = os.open(run_folder / f"{role}.lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return {}
    try:
        # A shared lock is had at once where nobody holds the exclusive one.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        with contextlib.suppress(ValueError, OSError):
            facts: dict[str, Any] = json.loads(os.pread(descriptor, 4096, 0))
            return facts
        return {"pid": None}
    finally:
        os.close(descriptor)
    return {}


def runs(run_folder: Path, role: Role) -> bool:
    """Whether a process has a role, or will have it again soon: `millstream run` starts what has died."""
    return bool(holder(run_folder, role) or holder(run_folder, "run"))

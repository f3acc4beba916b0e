"""The roles of a home's processes: one process per role, held by flock, which the kernel releases at its death.

If `data/run` is moved or removed while processes hold roles, each puts its lock back, and the link to the sockets.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal, NewType, Self, TypeAlias, TypeVar

import structlog

from millstream.errors import HomeBusy, ShardLocked
from millstream.private_files import make_folder, open_private
from millstream.workers import Worker

logger = structlog.get_logger("millstream.roles")

_Result = TypeVar("_Result")
WriterRole = NewType("WriterRole", str)
"""The role of an appender to the home's logs, by the writer's name: see `writer_role`."""
ServerRole = NewType("ServerRole", str)
"""The role of a further server process on the home's port: see `server_role`."""
Role = Literal[
    "run", "owner", "pipeline", "serve", "follow", "promote", "reconcile", "replay", "forget", "delivery", "alerts"
]
"""`run`: the supervisor. `owner`: capture, the streams' writer. `pipeline`: the Spark driver. `serve`: HTTP
and Flight. `follow`: copies the streams that other nodes lead. `promote`: makes this node a leader.
`reconcile`: merges regions' tables, as the owner also does for a while before retention. `replay`: writes a range of records into a table of its own.
`forget`: deletes a table's older records. `delivery`: has the state of the streams' consumers. `alerts`: looks for conditions to report, and sends them."""

AnyRole: TypeAlias = Role | WriterRole | ServerRole
_HELD: Final[weakref.WeakSet[RoleLock]] = weakref.WeakSet()
"""This process's locks: a forked child has none of them."""
_WORDS: Final[dict[str, str]] = {
    "run": "`millstream run`",
    "owner": "`millstream capture run`",
    "pipeline": "`millstream pipeline run`",
    "serve": "`millstream serve`",
    "follow": "`millstream follow`",
    "promote": "`millstream promote`",
    "reconcile": "the reconciliation",
    "replay": "`millstream pipeline replay`",
    "forget": "`millstream tables copy --forget`",
    "delivery": "the process that delivers to consumers",
    "alerts": "the process that sends alerts",
}
_PARTS: Final = frozenset({"owner", "pipeline", "serve", "follow"})
"""The roles of the parts that `millstream run` starts again when they end."""
LOCK_PATIENCE_S: Final = 30.0
"""How long a supervised part waits for one whose supervisor was killed: it ends within a second or two."""
_STEP_ASIDE_S: Final = 15.0
"""How long an application that appends may take to answer its waiting callers."""
_POLL_S: Final = 0.1
_LOOKS_EVERY_S: Final = 0.5
"""How often a holder looks whether its lock's file is still in place."""
_SOCKETS_NAME: Final = "sockets"
"""The link to the folder of the home's sockets, next to the locks."""
_FACTS_BYTES: Final = 4096
"""Size of the facts in a lock's file: written whole, so that a reader never finds a part of them."""


class RoleLock:
    """A role of a home, held from `take` until `release` or the process's end. Not for sharing between threads."""

    def __init__(self, file: Path, descriptor: int, facts: dict[str, Any]) -> None:
        self._file = file
        self._descriptor = descriptor
        self._facts = facts
        self._sockets: Path | None = None
        """The target of the link to the sockets, as last seen."""
        self._is_taken = False
        """Whether another process has taken the role since the lock's file was removed."""
        self._moving = threading.Lock()
        self._keeper = Worker(f"role-{file.stem}", self._keep, every_s=_LOOKS_EVERY_S)

    @classmethod
    def take(cls, run_folder: Path, role: AnyRole, *, patience_s: float = 0.5, **facts: str | bool | None) -> RoleLock:
        """Take a role and record its holder.

        Args:
            run_folder: the home's `data/run`; it exists.
            patience_s: how long to wait for a holder that is just leaving (or for `holder`, which locks
                for a moment).
            facts: other facts about the holder; `what` is its name in errors.

        Raises:
            HomeBusy: another process has it; details: pid, role.
            OSError: the file can't be locked, or no thread started; the role isn't held.
        """
        file = run_folder / f"{role}.lock"
        descriptor = open_private(file, os.O_RDWR | os.O_CREAT)
        deadline = time.monotonic() + patience_s
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise _busy(run_folder, role) from None
                time.sleep(_POLL_S)
        except BaseException:
            os.close(descriptor)
            raise
        lock = cls(file, descriptor, {"pid": os.getpid(), "since": time.time()})
        try:
            lock.note(**facts)
            _HELD.add(lock)
            lock._keeper.start()
        except BaseException:
            lock.release()
            raise
        return lock

    def note(self, **facts: Any) -> None:
        """Record facts about the holder, in addition to earlier ones; `holder` returns what fits in 4 KiB."""
        self._facts |= facts
        line = json.dumps(self._facts).encode().ljust(_FACTS_BYTES)
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same, but its holder isn't recorded
            os.pwrite(self._descriptor, line, 0)

    def leave_to_parent(self) -> None:
        """Drop the lock object in a forked child: the role is the parent's, and ends with the parent."""
        descriptor, self._descriptor = self._descriptor, -1
        self._moving = threading.Lock()  # the parent's thread may have had it
        os.close(descriptor)

    def release(self) -> None:
        """Give the role back; calling it again does nothing."""
        with self._moving:
            # Two threads may release it: after the first, the number may be another file's.
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, 0)
                os.close(descriptor)
                _HELD.discard(self)
                self._keeper.stop()

    def _keep(self) -> bool:
        """Put the lock's file and the link to the sockets back if they were removed; return whether the role is held."""
        with self._moving:
            if self._descriptor < 0:
                return False
            with contextlib.suppress(OSError):  # for example a removed home: the next look tries again
                if not self._is_in_place():
                    self._put_back()
                self._keep_sockets()
        return True

    def _keep_sockets(self) -> None:
        link = self._file.with_name(_SOCKETS_NAME)
        try:
            self._sockets = link.readlink()
        except FileNotFoundError:
            if self._sockets is not None:
                link.symlink_to(self._sockets)

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._file.stat())
        except FileNotFoundError:
            return False

    def _put_back(self) -> None:
        folder = self._file.parent
        if not folder.parent.is_dir():
            return  # the whole home was removed
        make_folder(folder)
        fresh = open_private(self._file, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fresh, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.dup2(fresh, self._descriptor, inheritable=False)
        except BlockingIOError:
            if not self._is_taken:
                text = "another process took this role while its lock's file was missing; end one of the two"
                logger.warning(text, file=str(self._file))
            self._is_taken = True
            return
        finally:
            os.close(fresh)
        self._is_taken = False
        self.note()
        logger.warning("the file of a role's lock was missing, and is put back", file=str(self._file))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _busy(run_folder: Path, role: AnyRole) -> HomeBusy:
    """Return the error that names the process to stop: `millstream run` if it would start the role's holder again."""
    home, has = run_folder.parent.parent, holder(run_folder, role)
    pid, what = has.get("pid"), has.get("what") or _WORDS.get(role, "a writer")
    supervisor = holder(run_folder, "run").get("pid") if role in _PARTS else None
    # A part of a new `run` may wait for one whose supervisor was killed.
    if supervisor is not None and supervisor not in {os.getpid(), os.getppid()}:
        pid, what = supervisor, _WORDS["run"]
    if pid is None:
        return HomeBusy(f"{home} is in use by another process: {what}", pid=None, role=role)
    return HomeBusy(
        f"{home} is in use by process {pid}: {what}",
        hint=f"Close the home in that process, or stop it by `kill {pid}`."
        if "what" in has
        else f"Stop process {pid} by `kill {pid}`, then repeat the command; `millstream status` shows what runs.",
        pid=pid,
        role=role,
    )


def writer_role(name: str | None) -> WriterRole:
    """Return the role of a home's writer: of its only one, or of one among several by its name."""
    # Short, since it is in a socket's name.
    return WriterRole("writer" if name is None else f"writer-{hashlib.sha256(name.encode()).hexdigest()[:10]}")


def writer_roles(run_folder: Path) -> list[WriterRole]:
    """Return the roles of writers that are held, or were."""
    return sorted(WriterRole(file.stem) for file in run_folder.glob("writer*.lock"))


def server_role(number: int) -> ServerRole:
    """Return the role of a further server process by its number, from 2."""
    return ServerRole(f"serve-{number}")


def server_roles(run_folder: Path) -> list[ServerRole]:
    """Return the roles of further server processes that are held, or were."""
    return sorted(ServerRole(file.stem) for file in run_folder.glob("serve-*.lock"))


@contextlib.contextmanager
def nobody_writes(run_folder: Path) -> Iterator[None]:
    """Keep every other process from writing the home's logs; `HomeBusy` if one writes, and goes on.

    Applications that append give way to `owner`, and then append through the current writer.
    """
    with contextlib.ExitStack() as held:
        held.enter_context(RoleLock.take(run_folder, "owner"))
        for role in sorted({writer_role(None), *writer_roles(run_folder)}):
            held.enter_context(RoleLock.take(run_folder, role, patience_s=_STEP_ASIDE_S))
        yield


def holder(run_folder: Path, role: AnyRole) -> dict[str, Any]:
    """Return a role's holder: `pid`, `since`, and its recorded facts; empty if there is none.

    Doesn't disturb the holder.
    """
    try:
        descriptor = os.open(run_folder / f"{role}.lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return {}
    try:
        # A shared lock is granted at once if no process holds the exclusive one.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        with contextlib.suppress(ValueError, OSError):
            facts: dict[str, Any] = json.loads(os.pread(descriptor, _FACTS_BYTES, 0))
            return facts
        return {"pid": None}
    finally:
        os.close(descriptor)
    return {}


def runs(run_folder: Path, role: Role) -> bool:
    """Return whether a process has a role, or will have it again soon: `millstream run` restarts dead parts."""
    return bool(holder(run_folder, role) or holder(run_folder, "run"))


def _leave_all_to_parent() -> None:
    for lock in list(_HELD):
        lock.leave_to_parent()
    _HELD.clear()


os.register_at_fork(after_in_child=_leave_all_to_parent)


def once_let_go(do: Callable[[], _Result], within_s: float) -> _Result:
    """Do something that takes a log's locks, once their holder has released them.

    `ShardLocked` if it doesn't within that time.
    """
    deadline = time.monotonic() + within_s
    while True:
        try:
            return do()
        except ShardLocked:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)

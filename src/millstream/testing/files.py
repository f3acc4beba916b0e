"""Files in memory with a durable side, and the failure modes of a disk.

`MemoryFiles` separates the system's view (the page cache) from the disk's content. A write is certainly
on the disk only after its file's `sync`, a name only after its folder's `sync_dir`. `crash` drops the
system's view and decides for every unsynced write and name whether the disk kept it: nothing, all, some
of them in any order, writes torn at any byte.

`FaultPlan` makes operations fail by their number: the process dies there (`Crash`), or the call gets an
`OSError`.
"""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

_BLOCK: Final = 512
"""Size in bytes that a disk writes atomically."""


class Crash(BaseException):
    """The process dies at this operation. No handler for errors may catch it."""


@dataclass(slots=True)
class FaultPlan:
    """The fault for each operation; operations that change anything are counted from 1.

    Concurrency: any number of threads may count.
    """

    crash_at: int | None = None
    """The process dies at this operation; a write dies with any part of it done."""
    fail_sync_at: frozenset[int] = frozenset()
    """fsyncs (with their own count, from 1) that fail with EIO; the system forgets that the bytes were unsynced."""
    fail_write_at: frozenset[int] = frozenset()
    """Writes (with their own count, from 1) that fail with EIO, half done."""
    fail_at: frozenset[int] = frozenset()
    """Operations of any kind that fail with EIO: a write half done, an fsync as above, names and lengths unchanged."""
    operations: int = 0
    syncs: int = 0
    writes: int = 0
    log: list[str] = field(default_factory=list)
    """The operations by name and path, for messages of failing tests."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, what: str, path: str) -> None:
        """Count one more operation; `Crash` if the plan has it."""
        with self._lock:
            self.operations += 1
            self.log.append(f"{self.operations} {what} {path}")
            if self.crash_at is not None and self.operations >= self.crash_at:
                raise Crash(self.log[-1])
            if self.operations in self.fail_at and what not in _FAIL_BY_THEMSELVES:
                raise OSError(errno.EIO, f"{what} failed", path)

    def breaks_write(self) -> bool:
        """Return whether the last counted write fails."""
        return self.writes in self.fail_write_at or self.operations in self.fail_at

    def breaks_sync(self) -> bool:
        """Return whether the last counted fsync of a file fails."""
        return self.syncs in self.fail_sync_at or self.operations in self.fail_at


_FAIL_BY_THEMSELVES: Final = frozenset({"write", "sync"})
"""Operations with side effects when they fail."""


@dataclass(slots=True)
class _Write:
    """One unsynced change of a file's bytes: data at a position, or a new length."""

    position: int
    data: bytes | None


@dataclass(slots=True)
class _Node:
    """A file: the system's view, the disk's certain content, and the changes between."""

    now: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    unsynced: list[_Write] = field(default_factory=list)
    locked: bool = False

    def apply(self, change: _Write) -> None:
        _apply(self.now, change)
        self.unsynced.append(change)


def _apply(content: bytearray, change: _Write) -> None:
    if change.data is None:
        del content[change.position :]
        content.extend(bytes(change.position - len(content)))
        return
    end = change.position + len(change.data)
    content.extend(bytes(max(0, end - len(content))))
    content[change.position : end] = change.data


@dataclass(slots=True)
class _Folder:
    """A folder's names: in the system's view, certainly on the disk, and the changes between."""

    now: dict[str, _Node] = field(default_factory=dict)
    durable: dict[str, _Node] = field(default_factory=dict)
    unsynced: list[dict[str, _Node | None]] = field(default_factory=list)
    """Each change is atomic: names that get a node, or go (None)."""

    def apply(self, change: dict[str, _Node | None]) -> None:
        _rename(self.now, change)
        self.unsynced.append(change)


def _rename(names: dict[str, _Node], change: dict[str, _Node | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


class MemoryFile:
    """An open file; see `ports.WritableFile`."""

    def __init__(self, files: MemoryFiles, node: _Node, path: str) -> None:
        self._files = files
        self._node = node
        self._path = path
        self._holds_lock = False

    def pwrite(self, data: bytes | memoryview, position: int) -> None:
        """Write all, or as much as the plan allows."""
        self.pwritev([data], position)

    def pwritev(self, buffers: Sequence[bytes | memoryview], position: int) -> None:
        """Write all, or as much as the plan allows."""
        data = b"".join(bytes(buffer) for buffer in buffers)
        self._files.write(self._node, self._path, position, data)

    def sync(self) -> None:
        """Put earlier writes on the disk."""
        self._files.sync(self._node, self._path)

    def truncate(self, size: int) -> None:
        """Set the length."""
        self._files.plan.count("truncate", self._path)
        with self._files.lock:
            self._node.apply(_Write(size, None))

    def allocate(self, size: int) -> None:
        """Grow to that length, with zeros."""
        missing = size - len(self._node.now)
        if missing > 0:
            self._files.write(self._node, self._path, len(self._node.now), bytes(missing))

    def lock(self) -> bool:
        """Take the lock, unless another open file has it."""
        if self._node.locked and not self._holds_lock:
            return False
        self._node.locked = self._holds_lock = True
        return True

    def is_at(self, path: str) -> bool:
        """Return whether the path names this file."""
        return self._files.exists(path) and self._files._node(path) is self._node  # noqa: SLF001 (its own module)

    def size(self) -> int:
        """Return the length in the system's view."""
        return len(self._node.now)

    def close(self) -> None:
        """Give up the lock."""
        if self._holds_lock:
            self._node.locked = self._holds_lock = False


class MemoryFiles:
    """`ports.Files` in memory; see the module.

    Args:
        plan: the faults.
        capacity_bytes: the disk's size; writes beyond it fail with ENOSPC, half done.

    Concurrency: any number of threads.
    """

    def __init__(self, plan: FaultPlan | None = None, *, capacity_bytes: int = 1 << 40) -> None:
        self.plan = FaultPlan() if plan is None else plan
        self.capacity_bytes = capacity_bytes
        self.lock = threading.RLock()
        self._folders: dict[str, _Folder] = {"/": _Folder()}

    # --- ports.Files -----------------------------------------------------------------------------------------------

    def create(self, path: str) -> MemoryFile:
        """Make a new file."""
        folder, name = self._place(path)
        if name in folder.now:
            raise FileExistsError(errno.EEXIST, "exists", path)
        self.plan.count("create", path)
        node = _Node()
        with self.lock:
            folder.apply({name: node})
        return MemoryFile(self, node, path)

    def open_write(self, path: str) -> MemoryFile:
        """Open an existing file."""
        return MemoryFile(self, self._node(path), path)

    def read(self, path: str, position: int = 0, length: int | None = None) -> bytes:
        """Return the system's view."""
        with self.lock:
            content = self._node(path).now
            end = len(content) if length is None else position + length
            return bytes(content[position:end])

    def size(self, path: str) -> int:
        """Return the length in the system's view."""
        return len(self._node(path).now)

    def listdir(self, path: str) -> list[str]:
        """Return the files and folders in a folder."""
        path = path.rstrip("/")
        if path not in self._folders:
            raise FileNotFoundError(errno.ENOENT, "no such folder", path)
        below = {name[len(path) + 1 :] for name in self._folders if name.startswith(path + "/")}
        with self.lock:
            return sorted({*self._folders[path].now, *(name for name in below if "/" not in name)})

    def is_folder(self, path: str) -> bool:
        """Return whether it is a folder."""
        return path.rstrip("/") in self._folders

    def exists(self, path: str) -> bool:
        """Return whether it exists in the system's view."""
        if path in self._folders:
            return True
        folder = self._folders.get(path.rpartition("/")[0])
        return folder is not None and path.rpartition("/")[2] in folder.now

    def rename(self, old: str, new: str) -> None:
        """Rename atomically, within one folder; durable at once for a folder."""
        if old in self._folders:
            self.plan.count("rename", f"{old} → {new}")
            with self.lock:
                if new in self._folders:
                    raise OSError(errno.ENOTEMPTY, "exists", new)
                for path in [path for path in self._folders if path == old or path.startswith(f"{old}/")]:
                    self._folders[new + path[len(old) :]] = self._folders.pop(path)
            return
        folder, old_name = self._place(old)
        same, new_name = self._place(new)
        assert folder is same, "the log renames within a folder only"
        node = self._node(old)
        self.plan.count("rename", f"{old} → {new_name}")
        with self.lock:
            folder.apply({old_name: None, new_name: node})

    def remove(self, path: str) -> None:
        """Remove a name."""
        folder, name = self._place(path)
        self._node(path)
        self.plan.count("remove", path)
        with self.lock:
            folder.apply({name: None})

    def makedirs(self, path: str) -> None:
        """Make a folder; folders themselves don't get lost here."""
        parts = path.strip("/").split("/")
        for depth in range(1, len(parts) + 1):
            self._folders.setdefault("/" + "/".join(parts[:depth]), _Folder())

    def sync_dir(self, path: str) -> None:
        """Put the folder's names on the disk."""
        self.plan.count("sync_dir", path)
        folder = self._folders[path.rstrip("/")]
        with self.lock:
            folder.durable = dict(folder.now)
            folder.unsynced.clear()

    def disk_usage(self, path: str) -> tuple[int, int]:
        """Return the space that the files take."""
        del path
        return self.used_bytes(), self.capacity_bytes

    # --- the files' side

    def used_bytes(self) -> int:
        """Return the bytes of all files that have a name."""
        with self.lock:
            return sum(len(node.now) for folder in self._folders.values() for node in folder.now.values())

    def write(self, node: _Node, path: str, position: int, data: bytes) -> None:
        """Write, unless the plan or the disk's size interrupts it."""
        self.plan.writes += 1
        half = _Write(position, data[: len(data) // 2])
        try:
            self.plan.count("write", path)
        except Crash:
            node.apply(_Write(position, data))  # `crash` decides which part of it reached the disk
            raise
        with self.lock:
            if self.plan.breaks_write():
                node.apply(half)
                raise OSError(errno.EIO, "the disk is broken", path)
            grown = max(0, position + len(data) - len(node.now))
            if grown and self.used_bytes() + grown > self.capacity_bytes:
                node.apply(half)
                raise OSError(errno.ENOSPC, "no space left", path)
            node.apply(_Write(position, data))

    def sync(self, node: _Node, path: str) -> None:
        """Sync, unless the plan makes it fail."""
        self.plan.count("sync", path)
        with self.lock:
            self.plan.syncs += 1
            if self.plan.breaks_sync():
                # As Linux does it: the pages are marked clean, and a second fsync "succeeds". Nothing
                # reached the disk.
                node.unsynced.clear()
                raise OSError(errno.EIO, "fsync failed", path)
            for change in node.unsynced:
                _apply(node.durable, change)
            node.unsynced.clear()

    # --- crashes ---------------------------------------------------------------------------------------------------

    def crash(self, keep: Callable[[int], Sequence[float]] | None = None, *, process_only: bool = False) -> MemoryFiles:
        """Return the disk as a new process finds it, with a fresh plan.

        Args:
            keep: returns for n unsynced changes of a file or folder a number each: 0 lost, 1 kept,
                between them only a part of it (names and lengths are kept from 0.5 on); see `lose_all`,
                `keep_any`. Without it all are kept.
            process_only: the process died but the system lives: everything is kept, synced or not, and
                unsynced changes stay unsynced.
        """
        survivor = MemoryFiles(capacity_bytes=self.capacity_bytes)
        nodes: dict[int, _Node] = {}

        def settle(node: _Node) -> _Node:
            if id(node) not in nodes:
                nodes[id(node)] = _after_crash(node, keep, process_only=process_only)
            return nodes[id(node)]

        for path, folder in self._folders.items():
            if process_only or keep is None:
                names = dict(folder.now)
            else:
                names = dict(folder.durable)
                shares = keep(len(folder.unsynced))
                for change, share in zip(folder.unsynced, shares, strict=True):
                    if share >= 0.5:
                        _rename(names, change)
            now = {name: settle(node) for name, node in names.items()}
            durable = {name: settle(node) for name, node in folder.durable.items()} if process_only else dict(now)
            survivor._folders[path] = _Folder(now, durable)
            if process_only:
                survivor._folders[path].unsynced = [
                    {name: None if node is None else settle(node) for name, node in change.items()}
                    for change in folder.unsynced
                ]
        return survivor

    def damage(self, path: str, position: int, data: bytes) -> None:
        """Change bytes on the disk without the system's knowledge."""
        node = self._node(path)
        _apply(node.now, _Write(position, data))
        _apply(node.durable, _Write(position, data))

    def _place(self, path: str) -> tuple[_Folder, str]:
        folder, _, name = path.rpartition("/")
        if folder not in self._folders:
            raise FileNotFoundError(errno.ENOENT, "no such folder", path)
        return self._folders[folder], name

    def _node(self, path: str) -> _Node:
        folder, name = self._place(path)
        if name not in folder.now:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return folder.now[name]


def _after_crash(node: _Node, keep: Callable[[int], Sequence[float]] | None, *, process_only: bool) -> _Node:
    if process_only:
        return _Node(bytearray(node.now), bytearray(node.durable), list(node.unsynced))
    if keep is None:
        return _Node(bytearray(node.now), bytearray(node.now))
    content = bytearray(node.durable)
    for change, share in zip(node.unsynced, keep(len(node.unsynced)), strict=True):
        if change.data is None:
            if share >= 0.5:
                _apply(content, change)
        else:
            for start, data in _surviving(change.data, share):
                _apply(content, _Write(change.position + start, data))
    return _Node(content, bytearray(content))


def _surviving(data: bytes, share: float) -> list[tuple[int, bytes]]:
    """Return the surviving parts of a write: below 0.5 its beginning, torn at a byte; above it any of its blocks."""
    if share in {0.0, 1.0}:
        return [(0, data)] if share else []
    if share < 0.5:
        return [(0, data[: round(len(data) * 2 * share)])]
    chance = random.Random(share)
    blocks = range(0, len(data), _BLOCK)
    return [(start, data[start : start + _BLOCK]) for start in blocks if chance.random() < share]


def lose_all(changes: int) -> list[float]:
    """Return the choice for a power cut before anything unsynced had reached the disk."""
    return [0.0] * changes


def keep_any(seed: int) -> Callable[[int], list[float]]:
    """Return the choice for a power cut after any subset of changes had reached the disk.

    The changes are kept in any order, torn at any byte.
    """
    chance = random.Random(seed)

    def keep(changes: int) -> list[float]:
        return [chance.choice((0.0, 1.0, chance.random())) for _ in range(changes)]

    return keep

"""A Delta log in an object store, copied to this machine: delta-rs works on the copy, and its commits are sent to the store.

delta-rs reads the commits of a log two or three times when it opens a table, and again after a commit: 60 requests for a
table and batch. The files of a log never change, so a process keeps the last checkpoint and the later commits of the tables
that it commits to. One listing tells which came since. It also tells whether the newest known commit is the same:
a table that was dropped, made again or set back has another one or none, and is read as if it were unknown.

Each handle has its copy in a folder of its own. delta-rs commits there, with its checks; then the commit is written to the
store, unless the store has that version. If it has, the commit is taken back, the versions that came first are fetched, and
delta-rs commits again in the state in which the handle was opened. It rebases the commit or refuses it, as it does
in the store.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Final

from deltalake import DeltaTable

from millstream.errors import LakeConflict, LakeUnavailable
from millstream.lake.delta.object_store.store_client import StoreClient, StoredObject, store_client
from millstream.lake.layout import LakeLayout
from millstream.lake.store_errors import plain_text, store_error

_LOG: Final = "_delta_log"
_LAST_CHECKPOINT: Final = "_last_checkpoint"
_FILE: Final = re.compile(r"([0-9]{20})\.(json|checkpoint\.parquet)")
_KEPT_BYTES_MAX: Final = 64 << 20
_TRIES: Final = 20
_PARALLEL: Final = 8
"""Requests at a time when a log is fetched for the first time."""
_PAUSE_S: Final = 0.1
_PREFIX: Final = "millstream-log-"
_LEFT_S: Final = 86_400.0
"""Age of a copy's folder whose process must have been killed: a handle lasts for one write."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A log's last checkpoint and all commits from there on."""

    files: Mapping[str, bytes]
    """Contents by name."""
    base: int
    """The checkpoint's version; -1: the log is known from its first commit."""
    newest: int
    tag: str
    """The store's tag of the newest commit."""

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.files.values()))

    def followed_by(self, version: int, commit: bytes, tag: str, checkpoint: bytes | None) -> _Known:
        """Return the log with one more commit, and perhaps a checkpoint of it."""
        if checkpoint is None:
            return _Known({**self.files, _commit(version): commit}, self.base, version, tag)
        files = {_checkpoint(version): checkpoint, _commit(version): commit}
        return _Known(files, version, version, tag)


_Key = tuple[tuple[tuple[str, str], ...], str]


class KeptLogs:
    """Logs by the store's options and the table's address, of a bounded size in all. Any thread."""

    def __init__(self) -> None:
        self._logs: OrderedDict[_Key, tuple[_Known, int]] = OrderedDict()
        """Each log with its bytes, the longest unused first."""
        self._bytes = 0
        self._lock: Final = Lock()

    def get(self, key: _Key) -> _Known | None:
        """Return a log; None if it isn't kept."""
        with self._lock:
            found = self._logs.get(key)
        return None if found is None else found[0]

    def put(self, key: _Key, known: _Known | None) -> None:
        """Keep a log in place of the one that was kept; None drops it. The longest unused go if there are too many bytes."""
        size_bytes = 0 if known is None else known.size_bytes
        with self._lock:
            self._bytes -= self._logs.pop(key, (None, 0))[1]
            if known is not None:
                self._logs[key] = known, size_bytes
                self._bytes += size_bytes
            while len(self._logs) > 1 and self._bytes > _KEPT_BYTES_MAX:
                self._bytes -= self._logs.popitem(last=False)[1][1]


_kept = KeptLogs()


class LogCopy:
    """A copy of a table's log in a folder of its own, for one handle; the folder goes with the object."""

    def __init__(self, client: StoreClient, key: _Key, known: _Known, patience_s: float) -> None:
        self._client = client
        self._key = key
        self._known = known
        self._patience_s = patience_s
        remove_left_copies(tempfile.gettempdir())
        self.folder: Final = tempfile.mkdtemp(prefix=_PREFIX)
        """The table's folder, with nothing but the log."""
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._log: Final = Path(self.folder, _LOG)
        self._log.mkdir()
        self._write(known.files)

    def commit(self, table: DeltaTable, write: Callable[[], object]) -> None:
        """Commit through a handle on the copy, and send the commit to the store; the handle is at the new version.

        Args:
            write: commits through it; called again, at the handle's version, if another commit came first in the store.

        Raises:
            LakeConflict: other commits came first at every try, or the table is another one by now.
            DeltaError: delta-rs refuses the commit behind those that came first.
            LakeUnavailable: the copy's folder can't be written.
            OSError: the store doesn't answer; it may have the commit.
        """
        version = int(table.version())
        for _ in range(_TRIES):
            with self._local_errors():
                write()
                table.update_incremental()
            made = [v for v in self._versions() if v > self._known.newest]
            for place, one in enumerate(made):
                if not self._send(one):
                    self._take_back(made[place:])
                    if place:
                        raise self._conflict()
                    break
            else:
                return
            newer = _advanced(self._client, self._known, from_base=True)
            if newer is None:
                raise self._conflict()
            with self._local_errors():
                self._write({name: content for name, content in newer.files.items() if name not in self._known.files})
            self._known = newer
            table.load_as_version(version)
        raise self._conflict()

    def _conflict(self) -> LakeConflict:
        path = self._key[1]
        return LakeConflict(f"another writer committed to {path} first", path=path)

    @contextlib.contextmanager
    def _local_errors(self) -> Iterator[None]:
        """Translate errors of the folder, which would read as errors of the store."""
        try:
            yield
        except OSError as error:
            raise LakeUnavailable(
                f"{self._key[1]}: the copy of its log in {self.folder} can't be written: {plain_text(error)}",
                hint=f"Check the disk of {Path(self.folder).parent}; TMPDIR names another folder.",
                path=self._key[1],
            ) from error

    def _versions(self) -> list[int]:
        return sorted(int(path.stem) for path in self._log.glob("*.json") if path.stem.isdecimal())

    def _write(self, files: Mapping[str, bytes]) -> None:
        for name, content in files.items():
            (self._log / name).write_bytes(content)

    def _take_back(self, versions: Sequence[int]) -> None:
        for version in versions:
            for name in (_commit(version), _checkpoint(version)):
                (self._log / name).unlink(missing_ok=True)
        (self._log / _LAST_CHECKPOINT).unlink(missing_ok=True)

    def _send(self, version: int) -> bool:
        """Write a commit to the store, with its checkpoint; return False if the store has another one of the version."""
        checkpoint = self._log / _checkpoint(version)
        with self._local_errors():
            content = (self._log / _commit(version)).read_bytes()
            made = checkpoint.read_bytes() if checkpoint.exists() else None
        tag = self._send_commit(f"{_LOG}/{_commit(version)}", content)
        if tag is None:
            return False
        tag = tag or self._listed_tag(version)
        if made is not None:
            # The commit stands without it, and maintenance makes one later.
            with contextlib.suppress(OSError):
                self._client.put(f"{_LOG}/{checkpoint.name}", made)
                self._client.put(f"{_LOG}/{_LAST_CHECKPOINT}", (self._log / _LAST_CHECKPOINT).read_bytes())
        self._known = self._known.followed_by(version, content, tag, made)
        _kept.put(self._key, self._known if tag else None)
        return True

    def _listed_tag(self, version: int) -> str:
        """Return the tag that a listing has of a commit that the store has; empty if it can't be had."""
        with contextlib.suppress(OSError):
            for one in self._client.listed(_LOG, behind=f"{version:020}"):
                if one.name == _commit(version):
                    return one.tag
        return ""

    def _send_commit(self, name: str, content: bytes) -> str | None:
        """Write a commit to the store; return its tag, empty if it isn't known, or None if there is another commit.

        If the answer is lost, the store is asked for the version: a commit has a random id, so the same bytes are the same
        commit.
        """
        until_s = time.monotonic() + self._patience_s
        while True:
            try:
                tag = self._client.put_new(name, content)
            except OSError as error:
                if store_error(self._key[1], error) is not None:
                    raise
                with contextlib.suppress(OSError):
                    if (there := self._client.get(name)) is not None:
                        return "" if there == content else None
                if time.monotonic() >= until_s:
                    raise
                time.sleep(_PAUSE_S)
                continue
            if tag is None:
                return "" if self._client.get(name) == content else None
            return tag


@cache
def remove_left_copies(temporary: str) -> None:
    """Remove the copies that killed processes left in a temporary folder, once a process."""
    for folder in Path(temporary).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_mtime < time.time() - _LEFT_S:
                shutil.rmtree(folder, ignore_errors=True)


def copied_log(layout: LakeLayout, path: str) -> LogCopy | None:
    """Return a copy of a table's log as it is now; None if there is no such table, or the log isn't to be had this way.

    Raises:
        OSError: the store doesn't answer.
    """
    client = store_client(layout, path)
    if client is None:
        return None
    key = (tuple(sorted(layout.storage_options.items())), path)
    known = _kept.get(key)
    found = None if known is None else _advanced(client, known)
    if found is None:
        found = _fetched(client, client.listed(_LOG), None)
    _kept.put(key, found)
    if found is None:
        return None
    try:
        return LogCopy(client, key, found, layout.patience_s)
    except OSError:
        return None  # this machine's temporary folder is missing or full, and the store's log can be used without it


def _advanced(client: StoreClient, known: _Known, *, from_base: bool = False) -> _Known | None:
    """Return a known log with what came since; None if the store has another log by now.

    Args:
        from_base: keep the base, and fetch every later commit: a handle on the known log checks each of them for
            conflicts. Otherwise a newer checkpoint replaces the commits before it.
    """
    listed = client.listed(_LOG, behind=f"{known.newest:020}")  # before the names of the newest version's files
    if not any(one.name == _commit(known.newest) and one.tag == known.tag for one in listed):
        return None
    return _fetched(client, listed, known, from_base=from_base)


def _fetched(
    client: StoreClient, listed: Sequence[StoredObject], known: _Known | None, *, from_base: bool = False
) -> _Known | None:
    """Return a log from its last checkpoint on, by its files in the store; None if some are missing."""
    tags, checkpoints = dict[int, str](), set[int]()
    for one in listed:
        matched = _FILE.fullmatch(one.name)
        if matched is not None and matched[2] == "json":
            tags[int(matched[1])] = one.tag
        elif matched is not None:
            checkpoints.add(int(matched[1]))
    if not tags:
        return None
    newest = max(tags)
    base = max((version for version in checkpoints if version <= newest), default=-1)
    files: Mapping[str, bytes] = {}
    if known is not None:
        base, files = known.base if from_base else max(base, known.base), known.files
    names = [_commit(version) for version in range(max(base, 0), newest + 1)]
    if base >= 0:
        names.append(_checkpoint(base))
    missing = [name for name in names if name not in files]
    with ThreadPoolExecutor(_PARALLEL) as pool:
        found = dict(zip(missing, pool.map(lambda name: client.get(f"{_LOG}/{name}"), missing), strict=True))
    contents = {name: found[name] if name in found else files[name] for name in names}
    there = {name: content for name, content in contents.items() if content is not None}
    return _Known(there, base, newest, tags[newest]) if len(there) == len(names) else None


def _commit(version: int) -> str:
    return f"{version:020}.json"


def _checkpoint(version: int) -> str:
    return f"{version:020}.checkpoint.parquet"


__all__ = ["KeptLogs", "LogCopy", "copied_log", "remove_left_copies"]

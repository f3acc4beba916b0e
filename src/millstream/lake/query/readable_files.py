"""The files of a lake that DuckDB may read: handed over one by one, read only, under names with no meaning elsewhere.

DuckDB's own access to files is switched off, because it doesn't distinguish reading from writing: a
folder that it may read it may also write. Instead it gets a file system that opens only files
handed over, and can't write.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from millstream.errors import InvalidQuery, LakeUnavailable, MillstreamError
from millstream.lake.query.read_only_sql import READ_ONLY_HINT

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

PROTOCOL: Final = "lake"
PREFIX: Final = f"{PROTOCOL}://"


class HandedFiles:
    """Paths by name. DuckDB's threads open them; `hand_over` is for the session's thread."""

    def __init__(self) -> None:
        self._paths: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self.failure: MillstreamError | None = None
        """The error of the last attempt that failed; DuckDB reports it with a traceback, as text."""

    def hand_over(self, path: str) -> str:
        """Return the name under which DuckDB may read a local file from now on. It has no pattern characters."""
        name = self._names.get(path)
        if name is None:
            name = self._names[path] = f"{PREFIX}{len(self._paths) + 1}"
            self._paths[name] = path
        return name

    def open(self, name: str, mode: str) -> _OpenFile:
        """Open a file to read it.

        Raises:
            InvalidQuery: it was not handed over, or would be written.
            LakeUnavailable: it is gone, or can't be read.
        """
        if mode != "rb":
            self.failure = InvalidQuery(f"the lake is read only: {name}", hint=READ_ONLY_HINT)
            raise self.failure
        path = self.path_of(name)
        try:
            return _OpenFile(self, path)
        except OSError as error:
            raise self.failed(path, error) from error

    def is_handed(self, name: str) -> bool:
        """Whether a name is one of those handed over."""
        return name in self._paths

    def path_of(self, name: str) -> str:
        """Return the path of a file that was handed over; raises `InvalidQuery` if it wasn't."""
        path = self._paths.get(name)
        if path is None:
            self.failure = InvalidQuery(f"a query reads the lake's tables and no other files: {name}")
            raise self.failure
        return path

    def stat(self, name: str) -> os.stat_result:
        """Return size and times of a file that was handed over; raises as `open`."""
        path = self.path_of(name)
        try:
            return Path(path).stat()
        except OSError as error:
            raise self.failed(path, error) from error

    def failed(self, path: str, error: OSError) -> MillstreamError:
        """Record that a file can't be read; return the error to raise."""
        gone = isinstance(error, FileNotFoundError)
        self.failure = LakeUnavailable(
            f"a file of the lake {'is gone' if gone else 'could not be read'}: {path}: {error.strerror}",
            hint="Query again, in a new session."
            if gone
            else "Check the disk and the permissions of the lake's folder.",
            path=path,
        )
        return self.failure


class _OpenFile:
    """One file, for DuckDB's threads: each has a position of its own, because DuckDB seeks and reads in two calls."""

    def __init__(self, files: HandedFiles, path: str) -> None:
        self._files, self._path = files, path
        self._descriptor = -1
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._at: dict[int, int] = {}

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        """Move; return the new position, in bytes."""
        thread = get_ident()
        if whence == os.SEEK_CUR:
            position += self._at.get(thread, 0)
        elif whence == os.SEEK_END:
            position += os.fstat(self._descriptor).st_size
        self._at[thread] = position
        return position

    def tell(self) -> int:
        """Return the calling thread's position, in bytes."""
        return self._at.get(get_ident(), 0)

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes; fewer than asked for at the end, or if the system reads fewer."""
        position = self.tell()
        try:
            if size < 0:
                size = max(0, os.fstat(self._descriptor).st_size - position)
            data = os.pread(self._descriptor, size, position)
        except OSError as error:
            raise self._files.failed(self._path, error) from error
        self._at[get_ident()] = position + len(data)
        return data

    def seekable(self) -> bool:
        """Whether `seek` works."""
        return True

    def close(self) -> None:
        """Close the file; a second call has no effect."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    __del__ = close
    """DuckDB drops a file without closing it."""


def file_system(files: HandedFiles) -> AbstractFileSystem:
    """Return the files as a file system for DuckDB. All writing, moving and deleting raises `NotImplementedError`."""
    from fsspec import AbstractFileSystem

    class ReadOnlyFiles(AbstractFileSystem):  # type: ignore[misc] # fsspec has no types
        protocol = PROTOCOL
        cachable = False

        def open(self, path: str, mode: str = "rb", **_options: Any) -> _OpenFile:
            return files.open(path, mode)

        def exists(self, path: str, **_options: Any) -> bool:
            return files.is_handed(path)

        isfile = exists

        def isdir(self, _path: str) -> bool:
            return False

        def glob(self, path: str, **_options: Any) -> list[str]:
            files.path_of(path)
            return [path]

        def size(self, path: str) -> int:
            return files.stat(path).st_size

        def modified(self, path: str) -> datetime:
            return datetime.fromtimestamp(files.stat(path).st_mtime, tz=UTC)

        def mkdir(self, path: str, *_options: Any, **_named: Any) -> None:
            files.open(path, "wb")

    return ReadOnlyFiles()

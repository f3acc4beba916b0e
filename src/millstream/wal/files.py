"""The real file system behind `ports.Files`, and the system's clock.

Every byte of the log passes through this interface, so that tests can replay every crash
(`millstream.testing.files`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, TypeGuard

from millstream.errors import DiskFull, LogError, MillstreamError, UnreadableBytes
from millstream.ports import Files, WritableFile
from millstream.private_files import make_folder, open_private, sync_folder
from millstream.wal.disk_space import NO_SPACE

_SINCE_BOOT: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
UNREADABLE: Final = frozenset({errno.EIO, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO)})
"""Error numbers of a page that the disk can't return, or whose checksum fails in the file system."""
_REFUSED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_WRONG_PATH: Final = frozenset(
    {errno.ENOENT, errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}
)
"""Error numbers of what is at a path, or isn't: the disk is well."""
_LIMITS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM})
"""Error numbers of a lack of descriptors, threads, processes or memory, which passes."""
_IOV_MAX: Final = 1024
"""Most buffers in one pwritev on Linux and macOS."""


def is_refused(error: BaseException) -> TypeGuard[OSError]:
    """Return whether the error means that this user lacks a permission."""
    return isinstance(error, OSError) and error.errno in _REFUSED


def error_of_os(error: OSError) -> MillstreamError:
    """Return this project's error for one of the operating system's, with the path that it names."""
    path = None if error.filename is None else os.fspath(error.filename)
    where = "" if path is None else f"{path if isinstance(path, str) else os.fsdecode(path)}: "
    message = f"{where}{error.strerror or error}"
    if error.errno in NO_SPACE:
        return DiskFull(message)
    if path is not None and error.errno in _REFUSED:
        code = "home_unwritable" if _is_readable(os.fsdecode(path)) else "home_unreadable"
        return MillstreamError(message, code=code, path=os.fsdecode(path))
    number = None if error.errno is None else errno.errorcode.get(error.errno, error.errno)
    hint = "Check the path, or name another one." if error.errno in _WRONG_PATH else None
    code = "system_limit" if error.errno in _LIMITS else "io_failed"
    return MillstreamError(
        message, code=code, hint=hint, path=None if path is None else os.fsdecode(path), errno=number
    )


def _is_readable(path: str) -> bool:
    """Return whether this user may read what is at a path; if nothing is there, the folder above it."""
    while not os.path.lexists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return os.access(path, os.R_OK | (os.X_OK if os.path.isdir(path) else 0))


def naming(error: OSError, path: str) -> OSError:
    """Return the same error with a path, which a call on a descriptor lacks."""
    return error if error.filename is not None else OSError(error.errno, error.strerror, path)


def check_is_at(file: WritableFile, path: str) -> None:
    """Raise an OSError if a path no longer names an open file: what is written to that file is lost on close."""
    if not file.is_at(path):
        raise FileNotFoundError(errno.ENOENT, "the file was removed or replaced while its writer had it open", path)


class RealFile:
    """A file open for writing; see `ports.WritableFile`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def pwrite(self, data: bytes | memoryview, position: int) -> None:
        """Write all bytes."""
        written = os.pwrite(self._descriptor, data, position)
        if written < len(data):
            self.pwritev([memoryview(data)[written:]], position + written)

    def pwritev(self, buffers: Sequence[bytes | memoryview], position: int) -> None:
        """Write all buffers, with as many system calls as it takes."""
        views = [view for buffer in buffers if (view := memoryview(buffer).cast("B")).nbytes]
        while views:
            written = os.pwritev(self._descriptor, views[:_IOV_MAX], position)
            position += written
            done = 0
            while done < len(views) and written >= views[done].nbytes:
                written -= views[done].nbytes
                done += 1
            views = views[done:]
            if written:
                views[0] = views[0][written:]

    def sync(self) -> None:
        """Call fdatasync; on macOS F_FULLFSYNC, since fsync there leaves the bytes in the drive's cache."""
        if sys.platform == "darwin":
            fcntl.fcntl(self._descriptor, fcntl.F_FULLFSYNC)
        else:
            os.fdatasync(self._descriptor)

    def truncate(self, size: int) -> None:
        """Set the file's length."""
        os.ftruncate(self._descriptor, size)

    def allocate(self, size: int) -> None:
        """Reserve space for that many bytes; the file grows to that length."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._descriptor, 0, size)
        else:
            os.ftruncate(self._descriptor, size)

    def lock(self) -> bool:
        """Take the file's lock for this process, until close or death; return False if another holds it."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def is_at(self, path: str) -> bool:
        """Return whether the path names this very file."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(path))
        except FileNotFoundError:
            return False

    def size(self) -> int:
        """Return the current length."""
        return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        """Close the file.

        A second close is a no-op, also from another thread: the descriptor may be another file's by
        then.
        """
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class RealFiles:
    """`ports.Files` of the operating system."""

    def create(self, path: str) -> RealFile:
        """Make a new file; raises `FileExistsError` if there is one."""
        return RealFile(open_private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))

    def open_write(self, path: str) -> RealFile:
        """Open an existing file."""
        return RealFile(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def read(self, path: str, position: int = 0, length: int | None = None) -> bytes:
        """Return bytes from a position; fewer at the end of the file.

        Raises `UnreadableBytes` if the disk can't return them, `home_unreadable` if this user may
        not read the file, `LogError` (`unexpected_file`) if it is a folder.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except PermissionError as error:
            raise error_of_os(error) from error
        try:
            # A length may come from damaged bytes, so memory is taken for the bytes that exist, not
            # for the length asked for.
            left = os.fstat(descriptor).st_size - position
            wanted = left if length is None else min(length, left)
            pieces: list[bytes] = []
            while wanted > 0 and (piece := os.pread(descriptor, wanted, position)):
                pieces.append(piece)
                position += len(piece)
                wanted -= len(piece)
        except IsADirectoryError as error:
            raise LogError(f"{path} is a folder, not a file of the log", code="unexpected_file", file=path) from error
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise naming(error, path) from error
            number = errno.EIO if error.errno is None else error.errno
            raise UnreadableBytes(
                f"byte {position} of {path} can't be read: {error.strerror}",
                path=path,
                byte=position,
                errno=errno.errorcode.get(number, str(number)),
            ) from error
        finally:
            os.close(descriptor)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def size(self, path: str) -> int:
        """Return the file's length."""
        return os.stat(path).st_size

    def listdir(self, path: str) -> list[str]:
        """Return the names in a folder, sorted."""
        try:
            return sorted(os.listdir(path))
        except PermissionError as error:
            raise error_of_os(error) from error

    def is_folder(self, path: str) -> bool:
        """Return whether the path is a folder."""
        return os.path.isdir(path)

    def exists(self, path: str) -> bool:
        """Return whether the path exists. Not `os.path.exists`, which says False if the disk can't tell."""
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def rename(self, old: str, new: str) -> None:
        """Rename atomically; replaces `new`."""
        os.replace(old, new)

    def remove(self, path: str) -> None:
        """Remove a file."""
        os.unlink(path)

    def makedirs(self, path: str) -> None:
        """Make a folder and its missing parents."""
        make_folder(path)

    def sync_dir(self, path: str) -> None:
        """Make the names in a folder durable."""
        sync_folder(path)

    def disk_usage(self, path: str) -> tuple[int, int]:
        """Return (used bytes, all bytes) as `df` shows them: blocks reserved for root count as neither."""
        try:
            stat = os.statvfs(path)
        except OSError as error:
            raise error_of_os(error) from error
        used = (stat.f_blocks - stat.f_bfree) * stat.f_frsize
        return used, used + stat.f_bavail * stat.f_frsize


def create_temporary(files: Files, path: str) -> WritableFile:
    """Make the file that is to take a path's name, next to it: `<path>.tmp`. A leftover one is replaced."""
    if files.exists(f"{path}.tmp"):
        files.remove(f"{path}.tmp")
    return files.create(f"{path}.tmp")


def put_in_place(files: Files, file: WritableFile, path: str, made_as: str | None = None) -> None:
    """Give a file its name, replacing what has it; durable when this returns. The file stays open.

    Args:
        file: the file, with its whole content.
        path: its name from now on.
        made_as: its name until now; None: as `create_temporary` made it.

    Raises:
        OSError: the disk is full, or fails. The path has the old content or the new.
    """
    file.sync()
    files.rename(made_as or f"{path}.tmp", path)
    files.sync_dir(os.path.dirname(path))


@contextmanager
def replacing(files: Files, path: str) -> Iterator[WritableFile]:
    """Yield a new file that takes the path's name when the block ends, durably.

    If the block fails, nothing changes and the new file is removed.

    Raises:
        OSError: as `put_in_place`.
    """
    file = create_temporary(files, path)
    try:
        yield file
        put_in_place(files, file, path)
    except Exception:
        with suppress(OSError):
            files.remove(f"{path}.tmp")
        raise
    finally:
        file.close()


class SystemClock:
    """`ports.Clock` of the operating system."""

    def now_ns(self) -> int:
        """Return the wall-clock time."""
        return time.time_ns()

    def monotonic_ns(self) -> int:
        """Return a time that never steps back.

        It counts time asleep, because a lease runs out while the machine sleeps.
        """
        return time.clock_gettime_ns(_SINCE_BOOT)

    def sleep(self, seconds: float) -> None:
        """Sleep for that many seconds."""
        time.sleep(seconds)

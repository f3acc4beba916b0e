"""Files and folders of a home are their owner's alone, whatever the umask: folders 0700, files 0600.

A folder that its owner has opened to its group, and closed to all others (0750), hands that on to what is made in it. So one `chmod -R g+rX,o=`
of a home's data gives a group access for good, and nothing takes it away at the next start.

`replacing` and `replace_file` are the one way to replace a file: readers and power cuts find the old content or the new. The log's files go through
`ports.Files`; `wal.files` does the same over that.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

UNFINISHED: Final = ".unfinished-"
"""Prefix of the names of files that `replacing` has not finished; one that a killed process left means nothing."""

_FOLDER: Final = 0o700
_FILE: Final = 0o600
_GROUP: Final = 0o050
_GROUP_READS: Final = 0o040
_OTHERS: Final = 0o007


def open_private(path: str | Path, flags: int) -> int:
    """Open a file as `os.open` does, and make it private if it is new; an opener for `open`, too. One that is there keeps its mode.

    Raises:
        OSError: as `os.open`.
    """
    while flags & os.O_CREAT:
        try:
            descriptor = os.open(path, flags | os.O_EXCL | os.O_CLOEXEC, _FILE)
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
        else:
            if _is_the_groups(Path(path).parent):
                os.fchmod(descriptor, _FILE | _GROUP_READS)  # the umask may take the group's bits
            return descriptor
        try:
            return os.open(path, flags & ~os.O_CREAT | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # it was removed between the two
    return os.open(path, flags | os.O_CLOEXEC)


def make_folder(folder: str | Path) -> None:
    """Make a folder and those above it that aren't there; one that is there keeps its mode.

    Raises:
        NotADirectoryError: something else is there.
        OSError: as `os.makedirs`.
    """
    path = Path(folder)
    if path.is_dir():
        return
    if path.parent != path:
        make_folder(path.parent)
    mode = _FOLDER | (_GROUP if _is_the_groups(path.parent) else 0)
    try:
        path.mkdir(mode)
    except FileExistsError:
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
        return
    path.chmod(mode)  # the umask may have taken the group's bits


@contextlib.contextmanager
def replacing(path: Path, *, private: bool = True, durable: bool = True, over: bool = True) -> Iterator[BinaryIO]:
    """Yield a new file of the same folder that takes the path's name when the block ends.

    If the block raises, nothing changes and the new file is removed.

    Args:
        path: the file to make, or to replace.
        private: make it as `open_private` does; otherwise as the umask has it.
        durable: return once content and name survive a power cut.
        over: replace a file that is there.

    Raises:
        FileExistsError: there is one, and `over` is False.
        OSError: the disk is full, or fails. Only if it failed at the folder's fsync, the path has the new content.
    """
    fresh = path.with_name(f"{UNFINISHED}{secrets.token_hex(8)}")
    try:
        with open(fresh, "xb", opener=open_private if private else None) as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        if over:
            fresh.replace(path)
        else:
            os.link(fresh, path)
    except OSError as error:
        if str(error.filename) == str(fresh):
            error.filename = str(path)  # the name that the caller gave
        raise
    finally:
        fresh.unlink(missing_ok=True)
    if durable:
        sync_folder(path.parent)


def replace_file(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a small private file whole or not at all; as `replacing`."""
    with replacing(path, durable=durable) as file:
        file.write(data)


def sync_folder(folder: str | Path) -> None:
    """Make the names in a folder durable. Raises `OSError` as `os.fsync`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def mask_files_of(folder: str | Path) -> None:
    """Set the process's umask, so that what other libraries and child processes write is as private as the folder's own files."""
    os.umask(0o027 if Path(folder).is_dir() and _is_the_groups(folder) else 0o077)


def is_open_to_others(path: str | Path) -> bool:
    """Whether any user may read a file or enter a folder; False if there is none."""
    try:
        return bool(Path(path).stat().st_mode & _OTHERS)
    except FileNotFoundError:
        return False


def _is_the_groups(folder: str | Path) -> bool:
    mode = Path(folder).stat().st_mode
    return mode & _GROUP == _GROUP and not mode & _OTHERS

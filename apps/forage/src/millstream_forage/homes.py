"""A home for Forage: made if there is none, and open in one process at a time."""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import millstream
from millstream import OpenHome
from millstream.errors import HomeBusy
from millstream_forage.errors import ForageError
from millstream_forage.tables import REGION_MAX, STREAM, has_stream, home_config, lacking, region_of

CONFIG_FILE: Final = "millstream.toml"
LOCK_FILE: Final = "forage.lock"


class NotForagesHome(ForageError):
    """The folder is a home that has no stream named `forage`."""

    code = "not_forages_home"
    default_hint = "Name a folder that doesn't exist yet; Forage makes its home there."


class HomeUnusable(ForageError):
    """The folder of the home can't be made, written or read, or its configuration can't be used."""

    code = "home_unusable"
    default_hint = "Give this user write access to the folder and room on its disk, or name another one with --home."


def opened_home(folder: Path, held: ExitStack) -> OpenHome:
    """Open a home, and make it if there is none.

    Args:
        held: gets what has to be closed.

    Raises:
        HomeBusy: another process has it.
        HomeUnusable: the folder can't be made, written or read, its configuration lacks settings of `home_config`, or its
            region is above `REGION_MAX`.
        NotForagesHome: the folder is another home.
        MillstreamError: the home can't be opened.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held.callback(os.close, locked(folder))
        config = folder / CONFIG_FILE
        if not config.exists():
            write_whole(config, home_config())
        text = config.read_text()
        is_ours = has_stream(text)
    except OSError as error:
        raise HomeUnusable(f"{folder} can't be Forage's home: {error.strerror}") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise HomeUnusable(f"{folder / CONFIG_FILE} can't be read: {error}", hint="Correct the file.") from error
    if not is_ours:
        raise NotForagesHome(f"{folder} is a home without the stream {STREAM}")
    if lacks := lacking(text):
        raise HomeUnusable(
            f"{config}: [streams.{STREAM}] lacks {', '.join(lacks)}",
            hint="Begin with the configuration that `millstream_forage.tables.home_config` returns.",
        )
    if region_of(text) > REGION_MAX:
        raise HomeUnusable(
            f"{config}: region {region_of(text)} is too great for ids that every JSON reader keeps exactly",
            hint=f"Give the home a number up to {REGION_MAX}.",
        )
    return held.enter_context(millstream.open(folder))


def write_whole(path: Path, text: str) -> None:
    """Write a file that is there with all of its text, or not at all, wherever the process is killed."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    with unfinished.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def locked(folder: Path) -> int:
    """Return a descriptor that holds a home's lock; the operating system drops it with the process.

    Raises:
        HomeBusy: another engine has it.
    """
    lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise HomeBusy(
            f"another process serves {folder}", hint="Stop it first, or name another folder with --home."
        ) from None
    return lock

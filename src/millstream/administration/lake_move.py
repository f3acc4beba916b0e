"""`pipeline move`: a stream's lake is copied to another place, compared, and named there by `location`.

The order, and why a crash after any step leaves a lake that is right:

1. Nothing lands: the command holds the locks of everything that writes into the lake.
2. A marker in the new place says whose unfinished move it is. Whatever an earlier move left there is deleted.
3. Every object is copied, read again and compared. The old lake is only read. Iceberg's metadata hold absolute addresses: they
   are written again in the new place, and compared.
4. The marker is deleted: a lake with one would be deleted by a later move to its place. With Iceberg, one transaction of the
   catalog follows. From it on the new lake is the lake, which commands report (`lake_moved`) until the next step.
5. `location` is replaced in `millstream.toml`, in one step. Before it a lake of Delta tables is the old one; after it the new
   one. The old lake stays until a person deletes it.

If an Iceberg lake's files were moved by hand, the catalog has other addresses than the present place. Then the command may
name that place: nothing is copied, and the metadata are written again next to the old ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.fs as pafs

from millstream import failpoints
from millstream.config.file import load_config
from millstream.config.file_edits import with_location
from millstream.errors import LakeError, UsageError
from millstream.home.config_mapping import lake_layout
from millstream.home.home import Home
from millstream.lake.data_files import probe_storage, remove_folder, storage_of
from millstream.lake.store_errors import lake_errors
from millstream.lake.table_format import format_of
from millstream.model.addresses import mask_address
from millstream.model.human_text import human_bytes
from millstream.private_files import make_folder, replace_file, replacing
from millstream.processes.role_locks import Role, RoleLock

if TYPE_CHECKING:
    from millstream.lake.layout import LakeLayout
    from millstream.lake.table_format import TablesMove

_ROLES: Final[tuple[Role, ...]] = ("run", "pipeline", "replay", "forget", "serve")
"""Everything that writes into the lake, and the server, which would go on reading the old one."""
_MARKER: Final = ".millstream-move"
_PIECE_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class MovedLake:
    """The result of a move."""

    stream: str
    old: str
    """The old lake's folder or URL, with the stream's name. Nothing reads it any longer."""
    new: str
    files: int
    """Number of files that were copied; 0 if they were in the new place already."""
    size_bytes: int


def move_lake(
    home: Home, location: str, *, stream: str | None = None, say: Callable[[str], None] = lambda _text: None
) -> MovedLake:
    """Move a stream's lake to another location, and name it in `millstream.toml`.

    Args:
        location: a folder (a relative one starts at the home) or the URL of an object store's prefix.

    Raises:
        HomeBusy: a process of the home lands or serves.
        UsageError: the lake is there already, or the place is within it; or the file names its location in a way that can't be
            replaced.
        LakeConflict: another program changed a table of an Iceberg lake; nothing was changed.
        LakeFilesGone: the metadata of an Iceberg table can't be read.
        ConfigError: the new location isn't one that the file may have.
        LakeError (`lake_table_exists`): something else lies there. Nothing was changed.
        LakeError (`lake_format_unsupported`): its tables are Iceberg's, and their catalog is a server.
        LakeError (`lake_in_database`): the stream's tables are in PostgreSQL.
        LakeUnavailable: either place can't be reached. The old lake is as it was.
    """
    home.prepare()
    name, config = home.stream_config(stream)
    with contextlib.ExitStack() as locks, home.open_catalog() as catalog:
        for role in _ROLES:
            locks.enter_context(RoleLock.take(home.run_folder, role))
        stream_id = catalog.stream(name).id
        old = lake_layout(home, name, config, stream_id)
        text = None if location == config.lake.location else _new_text(home, name, location)
        moved = config.model_copy(update={"lake": config.lake.model_copy(update={"location": location})})
        new = lake_layout(home, name, moved, stream_id)
        tables = format_of(old).move(old, new)
        if new.root == old.root and tables.is_done:
            raise UsageError(f"the lake of {name} lies at {mask_address(new.root)} already")
        if _is_within(new.root, old.root) or _is_within(old.root, new.root):
            raise UsageError(
                f"{mask_address(new.root)} and the lake at {mask_address(old.root)} can't lie one within the other"
            )
        files = size_bytes = 0
        if not tables.is_done:
            is_copied = new.root != old.root
            if is_copied:
                _take_place(new)
                files, size_bytes = _copy_files(old, new, tables, say)
            tables.write()
            if "://" not in new.location:
                os.sync()  # the file may name it only once a power cut can't take it away
            failpoints.hit("lake_move.copied")
            if text is not None:
                text = _new_text(home, name, location)  # someone may have edited the file while files were copied
            tables.switch(lambda: _unmark(new) if is_copied else None)
        failpoints.hit("lake_move.switched")
        if text is not None:
            _replace_config(home.config_file.resolve(), text)
    return MovedLake(name, old.root, new.root, files, size_bytes)


def _is_within(inner: str, outer: str) -> bool:
    return inner.startswith(f"{outer.rstrip('/')}/")


def _new_text(home: Home, stream: str, location: str) -> str:
    """Return the configuration's new text, checked: it is right, and names the location."""
    origin = home.loaded_config.origin(("streams", stream, "lake", "location"))
    text = with_location(home.config_file.read_text(encoding="utf-8"), stream, location)
    if text is None or origin.startswith("env "):
        raise UsageError(
            f"the lake's location is set by {origin}, where it can't be replaced",
            hint=f"Write it as a line of its own into [streams.{stream}.lake]: location = …",
        )
    with _beside(home.config_file, text) as file:
        loaded = load_config(file, needs_source=False)
    assert loaded.config.streams[stream].lake.location == location, "the new text names the location"
    return text


def _replace_config(file: Path, text: str) -> None:
    """Replace the configuration; it keeps its owner and its mode, so that whoever could read it still can."""
    facts = file.stat()
    with replacing(file) as fresh:
        fresh.write(text.encode())
        with contextlib.suppress(PermissionError):  # only root gives a file to another user
            os.fchown(fresh.fileno(), facts.st_uid, facts.st_gid)
        os.fchmod(fresh.fileno(), stat.S_IMODE(facts.st_mode))


@contextlib.contextmanager
def _beside(config_file: Path, text: str) -> Iterator[Path]:
    file = config_file.with_name(f"{config_file.name}.move")
    replace_file(file, text.encode())
    try:
        yield file
    finally:
        file.unlink()


def _take_place(new: LakeLayout) -> None:
    """Mark the new place as that of an unfinished move, and empty it if an earlier move has left something."""
    mark = json.dumps({"stream": str(new.stream_id)}).encode()
    if "://" in new.location:
        probe_storage(new)
    else:
        make_folder(Path(new.root))
    with lake_errors(new.root):
        storage = storage_of(new, new.root)
        there = storage.get_file_info(pafs.FileSelector("", recursive=True, allow_not_found=True))
        if any(info.is_file for info in there):
            marked = any(info.path == _MARKER for info in there)
            with storage.open_input_stream(_MARKER) if marked else contextlib.nullcontext() as file:
                found = None if file is None else file.read()
            if found != mark:
                raise LakeError(
                    f"{mask_address(new.root)} isn't empty: nothing was copied there",
                    code="lake_table_exists",
                    hint="Name an empty place, or delete what lies there.",
                    path=new.root,
                )
            remove_folder(new, new.root)
            if "://" not in new.location:
                make_folder(Path(new.root))
        with _sink(storage, _MARKER) as sink:
            sink.write(mark)


def _unmark(new: LakeLayout) -> None:
    with lake_errors(new.root):
        storage_of(new, new.root).delete_file(_MARKER)
    failpoints.hit("lake_move.unmarked")


def _copy_files(old: LakeLayout, new: LakeLayout, tables: TablesMove, say: Callable[[str], None]) -> tuple[int, int]:
    """Copy the files that stay as they are, and compare both places; return their number and size in bytes."""
    files = size_bytes = 0
    for path, size in _files(old, tables):
        _copy(old, new, path)
        files, size_bytes = files + 1, size_bytes + size
        if files % 1000 == 0:
            say(f"{files:,} files, {human_bytes(size_bytes)} copied")
    if _files(old, tables) != _files(new, tables):
        raise LakeError(
            f"{mask_address(old.root)} changed while it was copied", hint="Run the command again.", path=old.root
        )
    return files, size_bytes


def _files(layout: LakeLayout, tables: TablesMove) -> list[tuple[str, int]]:
    """Return the paths and sizes of a lake's files that are copied as they are, without a marker."""
    with lake_errors(layout.root):
        storage = storage_of(layout, layout.root)
        found = storage.get_file_info(pafs.FileSelector("", recursive=True, allow_not_found=True))
    files = ((info.path.lstrip("/"), info.size) for info in found if info.is_file and info.path != _MARKER)
    return sorted(file for file in files if tables.is_copied(file[0]))


def _copy(old: LakeLayout, new: LakeLayout, path: str) -> None:
    """Copy a file, read it again and compare."""
    source, target = storage_of(old, old.root), storage_of(new, new.root)
    folder = path.rpartition("/")[0]
    with lake_errors(f"{new.root}/{path}"):
        if folder and "://" not in new.location:
            target.create_dir(folder, recursive=True)
        read, written = hashlib.sha256(), hashlib.sha256()
        with source.open_input_stream(path) as file, _sink(target, path) as sink:
            for piece in _pieces(file):
                read.update(piece)
                sink.write(piece)
        with target.open_input_stream(path) as file:
            for piece in _pieces(file):
                written.update(piece)
    if read.digest() != written.digest():
        raise LakeError(f"{mask_address(new.root)}/{path} isn't what was written there", path=new.root)


def _sink(storage: pafs.FileSystem, path: str) -> pa.NativeFile:
    # Without a buffer, delta-rs's stream would get an object that isn't `bytes`, and refuse it.
    return storage.open_output_stream(path, buffer_size=_PIECE_BYTES)


def _pieces(file: pa.NativeFile) -> Iterator[bytes]:
    while piece := file.read(_PIECE_BYTES):
        yield piece

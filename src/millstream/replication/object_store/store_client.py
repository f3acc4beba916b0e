"""Objects under a URL: the operations that shipping needs, over an object store (obstore) or a folder.

An object is written whole or not at all, and a new one only if there is none of its name: of two
writers of one name, only one succeeds. Written objects are durable and listed when the call
returns. A folder achieves that by fsync and hard links, and needs no extra.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from millstream.codec.checksums import Bytes
from millstream.errors import MillstreamError, StoreUnavailable, UsageError
from millstream.errors.missing_extras import missing_extra
from millstream.model.addresses import mask_address
from millstream.model.option_flags import is_on
from millstream.private_files import UNFINISHED, replacing, sync_folder

_CHUNK_BYTES: Final = 8 << 20
"""Bytes of one part of a large object: stores require at least 5 MiB."""
_PAGE: Final = 1000
_TIMEOUT: Final = "30s"
_RETRIES: Final = 3


class Listed(NamedTuple):
    """An object's name and its size in bytes."""

    name: str
    size: int


class Objects(Protocol):
    """Objects by name; names are paths with `/`.

    Every call may raise `StoreUnavailable`: a write may then have happened or not.

    Concurrency: any number of threads.
    """

    def put_new(self, name: str, buffers: Sequence[Bytes]) -> bool:
        """Write an object if there is none; return False if there is one, which stays as it is."""

    def put_large(self, name: str, pieces: Iterable[Bytes]) -> None:
        """Write an object of any size, piece by piece; it replaces one of that name. It appears with the last piece."""

    def get(self, name: str, start: int = 0, length: int | None = None) -> memoryview | None:
        """Return an object's bytes, or some of them; None if there is none."""

    def listed(self, under: str, behind: str = "") -> Iterator[Listed]:
        """Yield the objects in a folder and its subfolders, by name, after the whole name `behind`. Page by page."""

    def folders(self, under: str) -> list[str]:
        """Return the folders in a folder, by their last names."""

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; a missing one is no error."""


def open_objects(url: str, options: Mapping[str, str] | None = None) -> Objects:
    """Open the objects under a URL: `file:///…`, or one that obstore knows (`s3://bucket/prefix`, `gs://`, `az://`).

    Args:
        options: of obstore's store, such as an endpoint; credentials and the rest come from the
            environment, by its names.

    Raises:
        UsageError: the URL is invalid.
        UsageError (`missing_extra`): obstore isn't installed.
        StoreUnavailable (`store_unusable`): obstore can't make a store of it.
    """
    if mask_address(url) != url:
        raise UsageError(
            f"{mask_address(url)!r} can't be the address of an object store: it has a user, a password or a key in it, or can't be parsed",
            hint="Write the store as s3://bucket/prefix, with its credentials in the store's own environment variables "
            "(AWS_ACCESS_KEY_ID …).",
        )
    parts = urlsplit(url)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise UsageError(f"{url} names no folder", hint="Write it as file:///srv/millstream.")
        return FolderObjects(Path(unquote(parts.path)))
    if not parts.scheme:
        raise UsageError(
            f"{url!r} is no address of an object store",
            hint="Write it as s3://bucket/prefix, or file:///srv/millstream.",
        )
    try:
        obstore = importlib.import_module("obstore")
        store = importlib.import_module("obstore.store")
    except ModuleNotFoundError as error:
        raise missing_extra(f"an object store needs {error.name}", "s3") from error
    config = dict(options or {})
    # An option of the HTTP client: obstore crashes if it is among the store's own. If the client
    # gets any option, its environment variable is ignored.
    allow_http = is_on(config.pop("allow_http", os.environ.get("AWS_ALLOW_HTTP", "")))
    client: dict[str, object] = {"timeout": _TIMEOUT, "allow_http": allow_http}
    try:
        made = store.from_url(url, config=config, client_options=client, retry_config={"max_retries": _RETRIES})
    except (obstore.exceptions.BaseError, ValueError, TypeError) as error:
        raise StoreUnavailable(
            f"{url} can't be used: {_line(error)}",
            code="store_unusable",
            hint="Write it as s3://bucket/prefix, gs://…, az://… or file:///….",
        ) from error
    return StoreObjects(obstore, made, url)


class StoreObjects:
    """See `Objects`: over obstore."""

    def __init__(self, obstore: ModuleType, store: Any, url: str) -> None:
        self._obstore = obstore
        self._store = store
        self._url = url

    def put_new(self, name: str, buffers: Sequence[Bytes]) -> bool:
        with self._telling(f"write {name}"):
            try:
                self._obstore.put(self._store, name, b"".join(buffers), mode="create", use_multipart=False)
            except (self._obstore.exceptions.AlreadyExistsError, self._obstore.exceptions.PreconditionError):
                return False
            return True

    def put_large(self, name: str, pieces: Iterable[Bytes]) -> None:
        with self._telling(f"write {name}"):
            # Pieces may come from the store itself, and obstore crashes on such a nested call. If
            # the pieces end too early, the writer isn't closed, and there is no object.
            writer = self._obstore.open_writer(self._store, name, buffer_size=_CHUNK_BYTES, max_concurrency=2)
            for piece in pieces:
                writer.write(piece)
            writer.close()

    def get(self, name: str, start: int = 0, length: int | None = None) -> memoryview | None:
        with self._telling(f"read {name}"):
            try:
                if length is not None:
                    return memoryview(self._obstore.get_range(self._store, name, start=start, length=length))
                return memoryview(self._obstore.get(self._store, name).bytes())[start:]
            except (self._obstore.exceptions.NotFoundError, FileNotFoundError):
                return None

    def listed(self, under: str, behind: str = "") -> Iterator[Listed]:
        with self._telling(f"list {under}"):
            pages = self._obstore.list(self._store, under, offset=behind or None, chunk_size=_PAGE)
            for page in pages:
                for found in page:
                    yield Listed(str(found["path"]), int(found["size"]))

    def folders(self, under: str) -> list[str]:
        with self._telling(f"list {under}"):
            found = self._obstore.list_with_delimiter(self._store, under)["common_prefixes"]
            return sorted(str(prefix).rstrip("/").rpartition("/")[2] for prefix in found)

    def delete(self, names: Sequence[str]) -> None:
        with self._telling("delete objects"):
            for start in range(0, len(names), _PAGE):
                with contextlib.suppress(self._obstore.exceptions.NotFoundError, FileNotFoundError):
                    self._obstore.delete(self._store, list(names[start : start + _PAGE]))

    @contextlib.contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        errors = self._obstore.exceptions
        try:
            yield
        except MillstreamError:
            raise
        except (errors.UnauthenticatedError, errors.PermissionDeniedError) as error:
            raise StoreUnavailable(
                f"{self._url} refuses to {what}: {_line(error)}",
                hint="Set credentials in the environment that may read, write, list and delete there.",
            ) from error
        except errors.NotSupportedError as error:
            raise StoreUnavailable(f"{self._url} can't {what}: {_line(error)}", code="store_unusable") from error
        except (errors.BaseError, OSError, ValueError) as error:
            if "NotImplemented" in str(error):
                raise StoreUnavailable(f"{self._url} can't {what}: {_line(error)}", code="store_unusable") from error
            raise StoreUnavailable(f"{self._url} failed to {what}: {_line(error)}") from error


class FolderObjects:
    """See `Objects`: files in a folder, which several machines may share if its file system has hard links.

    Args:
        folder: made if it doesn't exist.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put_new(self, name: str, buffers: Sequence[Bytes]) -> bool:
        return self._write(name, buffers, over=False)

    def put_large(self, name: str, pieces: Iterable[Bytes]) -> None:
        self._write(name, pieces, over=True)

    def get(self, name: str, start: int = 0, length: int | None = None) -> memoryview | None:
        with self._telling(f"read {name}"):
            try:
                with (self._folder / name).open("rb") as file:
                    file.seek(start)
                    return memoryview(file.read() if length is None else file.read(length))
            except FileNotFoundError:
                return None

    def listed(self, under: str, behind: str = "") -> Iterator[Listed]:
        with self._telling(f"list {under}"):
            yield from self._walk(under, behind)

    def folders(self, under: str) -> list[str]:
        with self._telling(f"list {under}"):
            try:
                return sorted(entry.name for entry in os.scandir(self._folder / under) if entry.is_dir())
            except FileNotFoundError:
                return []

    def delete(self, names: Sequence[str]) -> None:
        with self._telling("delete objects"):
            for name in names:
                (self._folder / name).unlink(missing_ok=True)

    def _walk(self, under: str, behind: str) -> Iterator[Listed]:
        try:
            entries = sorted(os.scandir(self._folder / under), key=lambda entry: entry.name)
        except FileNotFoundError:
            return
        for entry in entries:
            name = f"{under}/{entry.name}"
            if entry.is_dir():
                if f"{name}/\U0010ffff" > behind:
                    yield from self._walk(name, behind)
            elif name > behind and not entry.name.startswith(UNFINISHED):
                with contextlib.suppress(FileNotFoundError):
                    yield Listed(name, entry.stat().st_size)

    def _write(self, name: str, pieces: Iterable[Bytes], *, over: bool) -> bool:
        """Write a file durably; return False if there is one that may not be replaced."""
        path = self._folder / name
        with self._telling(f"write {name}"):
            if not path.parent.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                for folder in itertools.takewhile(lambda folder: folder != self._folder.parent.parent, path.parents):
                    sync_folder(folder)
            try:
                with replacing(path, private=False, over=over) as file:
                    file.writelines(pieces)
            except FileExistsError:
                return False
        return True

    @contextlib.contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreUnavailable(
                f"the folder {self._folder} failed to {what}: {error.strerror or error}",
                hint="Check that the store exists, has free space, and is writable by this user.",
            ) from error


def _line(error: Exception) -> str:
    """Return the first line of a client's message, which may go on for pages."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:500]

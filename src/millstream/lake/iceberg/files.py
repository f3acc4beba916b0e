"""Where the files of an Iceberg lake lie, and the file systems by which they are read and written.

Millstream's own access and pyiceberg's use the same clients: pyarrow's, with the options of the lake's store.
"""

from __future__ import annotations

import os
import socket
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.fs as pafs
from pyiceberg.io import (
    AWS_ACCESS_KEY_ID,
    AWS_REGION,
    AWS_ROLE_ARN,
    AWS_ROLE_SESSION_NAME,
    AWS_SECRET_ACCESS_KEY,
    AWS_SESSION_TOKEN,
    S3_ACCESS_KEY_ID,
    S3_ANONYMOUS,
    S3_CONNECT_TIMEOUT,
    S3_ENDPOINT,
    S3_FORCE_VIRTUAL_ADDRESSING,
    S3_PROXY_URI,
    S3_REGION,
    S3_REQUEST_TIMEOUT,
    S3_ROLE_ARN,
    S3_ROLE_SESSION_NAME,
    S3_SECRET_ACCESS_KEY,
    S3_SESSION_TOKEN,
)
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO
from pyiceberg.utils.properties import get_first_property_value, property_as_bool

from millstream.errors import LakeError
from millstream.lake.iceberg.catalog import catalog_errors, catalog_of, make_namespace
from millstream.lake.iceberg.names import namespace_of
from millstream.lake.layout import LakeLayout
from millstream.lake.store_errors import no_keys
from millstream.model.addresses import IN_CATALOG
from millstream.model.option_flags import is_on

if TYPE_CHECKING:
    from pyiceberg.typedef import Properties

_ATTEMPTS: Final = 5
"""Attempts of a request to a store, with pauses of some ten seconds in all; longer outages are the pipeline's to wait for."""
_CONNECT_S: Final = 5.0
_ANSWER_S: Final = 30.0
_KEPT_BYTES_MAX: Final = 32 << 20
_SOURCES_OF_KEYS: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_PROFILE",
    "AWS_ROLE_ARN",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_EC2_METADATA_SERVICE_ENDPOINT",
)
"""Variables that name keys, or where a store's client gets them."""
_FILES_OF_KEYS: Final = {"AWS_SHARED_CREDENTIALS_FILE": "credentials", "AWS_CONFIG_FILE": "config"}
_ROLES: Final = ("169.254.169.254", 80)
"""Where a machine in Amazon's cloud is asked for the keys of its role."""
_contents: Final[OrderedDict[str, bytes]] = OrderedDict()
"""Contents of metadata's files, by address."""
_lock: Final = Lock()
_places: Final[dict[tuple[tuple[tuple[str, str], ...], str], str]] = {}
"""Places of namespaces, which a catalog doesn't change, by the catalog's properties and the namespace."""


class LakeFileIO(PyArrowFileIO):
    """pyiceberg's access to files by pyarrow, with one client of a store for all tables of a process.

    Files of metadata in a store are read and written by one request, and read once.
    """

    def new_input(self, location: str) -> PyArrowFile:
        """Return a file to read."""
        return self._lake_file(location)

    def new_output(self, location: str) -> PyArrowFile:
        """Return a file to write."""
        return self._lake_file(location)

    def _lake_file(self, location: str) -> PyArrowFile:
        scheme, netloc, path = self.parse_location(location, self.properties)
        is_kept = scheme != "file" and "/metadata/" in location
        kind = _MetadataFile if is_kept else PyArrowFile
        return kind(location=location, path=path, fs=self.fs_by_scheme(scheme, netloc))

    def _initialize_s3_fs(self, netloc: str | None) -> pafs.FileSystem:
        known = {name: str(value) for name, value in self.properties.items() if name.startswith(("s3.", "client."))}
        return _s3(tuple(sorted(known.items())), netloc)


class _MetadataFile(PyArrowFile):
    """A file of a table's metadata in a store: small, under a name that no other file ever has, and never changed."""

    def __len__(self) -> int:
        return len(self._content())

    def open(self, seekable: bool = True) -> pa.BufferReader:  # noqa: ARG002, FBT001, FBT002 - pyiceberg's
        """Return the content."""
        return pa.BufferReader(self._content())

    def create(self, overwrite: bool = False) -> BytesIO:  # noqa: ARG002, FBT001, FBT002 - pyiceberg's
        """Return a stream that is written to the store when it is closed."""
        return _UntilClosed(self.location, super().create)

    def _content(self) -> bytes:
        known = _contents.get(self.location)
        if known is None:
            with super().open(seekable=False) as stream:
                known = bytes(stream.read())
            _keep(self.location, known)
        return known


class _UntilClosed(BytesIO):
    """A stream that keeps what is written, and writes it to a file when it is closed."""

    def __init__(self, location: str, create: Callable[[bool], pa.NativeFile]) -> None:
        super().__init__()
        self._location, self._create = location, create

    def close(self) -> None:
        if not self.closed:
            content = self.getvalue()
            super().close()
            # Without a look whether it is there: no other file has the name.
            with self._create(True) as sink:
                sink.write(content)
            _keep(self._location, content)


def _keep(location: str, content: bytes) -> None:
    with _lock:
        _contents[location] = content
        _contents.move_to_end(location)
        while len(_contents) > 1 and sum(map(len, _contents.values())) > _KEPT_BYTES_MAX:
            _contents.popitem(last=False)


def check_location(path: str) -> None:
    """Raise `LakeError` if an Iceberg table can't lie at a path: other programs take some characters for parts of a URL."""
    if any(character in path for character in "%#?"):
        raise LakeError(
            f"an Iceberg table can't lie at {path}: its path holds %, # or ?",
            hint="Name another location for the lake, or move the home to a folder without these.",
            path=path,
        )


def forget_content(location: str) -> None:
    """Drop what is kept of a file of metadata, so that the next read is the store's."""
    with _lock:
        _contents.pop(location, None)


def storage_of(layout: LakeLayout, path: str) -> pafs.FileSystem:
    """Return the file system whose root is a table's folder."""
    if "://" not in path:
        return pafs.SubTreeFileSystem(path, pafs.LocalFileSystem())
    with catalog_errors(path):
        properties = catalog_of(layout).properties
        scheme, netloc, place = PyArrowFileIO.parse_location(address_of(layout, path), properties)
        return pafs.SubTreeFileSystem(place, LakeFileIO(properties).fs_by_scheme(scheme, netloc))


def address_of(layout: LakeLayout, path: str) -> str:
    """Return a folder's address, as the catalog has it.

    Raises:
        LakeError: the catalog should say where tables lie, and doesn't.
    """
    if layout.location != IN_CATALOG:
        return path if "://" in path else f"file://{path}"
    # Within its namespace's place: some catalogs allow a table nowhere else.
    namespace, within = namespace_of(layout, path)
    key = (tuple(sorted(layout.catalog.items())), namespace)
    if key not in _places:
        _places[key] = _place_of(layout, namespace)
    return f"{_places[key]}{within}"


def _place_of(layout: LakeLayout, namespace: str) -> str:
    catalog = catalog_of(layout)
    make_namespace(catalog, namespace)
    place = catalog.load_namespace_properties(namespace).get("location")
    if place is None:
        raise LakeError(
            f"the catalog doesn't say where the tables of its namespace {namespace} lie",
            hint="Set `location` in `[streams.S.lake]`.",
        )
    return str(place).rstrip("/")


@lru_cache(maxsize=8)
def _s3(properties: tuple[tuple[str, str], ...], bucket: str | None) -> pafs.FileSystem:
    """Return the client of a bucket's store; it takes keys that aren't among the properties from the environment.

    Raises:
        LakeUnavailable (`lake_credentials`): there are no keys.
    """
    known: Properties = dict(properties)
    endpoint = known.get(S3_ENDPOINT) or os.environ.get("AWS_ENDPOINT_URL")
    region = get_first_property_value(known, S3_REGION, AWS_REGION) or os.environ.get("AWS_REGION")
    if region is None:
        region = os.environ.get("AWS_DEFAULT_REGION") or ("us-east-1" if endpoint else pafs.resolve_s3_region(bucket))
    optional = {
        "access_key": get_first_property_value(known, S3_ACCESS_KEY_ID, AWS_ACCESS_KEY_ID),
        "secret_key": get_first_property_value(known, S3_SECRET_ACCESS_KEY, AWS_SECRET_ACCESS_KEY),
        "session_token": get_first_property_value(known, S3_SESSION_TOKEN, AWS_SESSION_TOKEN),
        "role_arn": get_first_property_value(known, S3_ROLE_ARN, AWS_ROLE_ARN),
        "session_name": get_first_property_value(known, S3_ROLE_SESSION_NAME, AWS_ROLE_SESSION_NAME),
        "proxy_options": known.get(S3_PROXY_URI),
        "endpoint_override": endpoint,
        "region": region,
    }
    is_anonymous = property_as_bool(known, S3_ANONYMOUS, default=False)
    if not (is_anonymous or optional["access_key"] or optional["role_arn"] or _may_find_keys()):
        raise no_keys(f"s3://{bucket}")
    return pafs.S3FileSystem(
        **{name: value for name, value in optional.items() if value is not None},
        anonymous=is_anonymous,
        force_virtual_addressing=property_as_bool(known, S3_FORCE_VIRTUAL_ADDRESSING, default=False),
        connect_timeout=float(known.get(S3_CONNECT_TIMEOUT, _CONNECT_S)),
        request_timeout=float(known.get(S3_REQUEST_TIMEOUT, _ANSWER_S)),
        retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
        allow_delayed_open=True,  # a small file is one request then, not three
        background_writes=False,
    )


def _may_find_keys() -> bool:
    """Whether pyarrow's client may find keys that aren't named.

    Without any it sends requests unsigned, and a store's refusal of these doesn't say that keys are missing.
    """
    if any(os.environ.get(name) for name in _SOURCES_OF_KEYS):
        return True
    folder = Path(os.environ.get("HOME", "~")).expanduser() / ".aws"
    if any(Path(os.environ.get(name) or folder / file).is_file() for name, file in _FILES_OF_KEYS.items()):
        return True
    if is_on(os.environ.get("AWS_EC2_METADATA_DISABLED", "")):
        return False
    try:
        socket.create_connection(_ROLES, timeout=1.0).close()
    except OSError:
        return False
    return True

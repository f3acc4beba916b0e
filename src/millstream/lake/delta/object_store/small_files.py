"""New files of a lake in an object store, written by one request if they are small: delta-rs's client takes three."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO, RawIOBase
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.fs as pafs
from deltalake.fs import DeltaStorageHandler

from millstream.lake.delta.object_store.store_client import StoreClient, store_client

if TYPE_CHECKING:
    from millstream.lake.layout import LakeLayout

_SMALL_BYTES: Final = 8 << 20
"""Larger files are sent in parts, while they are written."""


class LakeStorageHandler(DeltaStorageHandler):
    """delta-rs's access to a folder in an object store, with small files written by one request."""

    _client: StoreClient | None = None

    @classmethod
    def of(cls, layout: LakeLayout, path: str) -> pafs.PyFileSystem:
        """Return the file system whose root is a folder of the lake."""
        handler = cls(path, layout.client_options(path))
        handler._client = store_client(layout, path)
        return pafs.PyFileSystem(handler)

    def open_output_stream(self, path: str, metadata: dict[str, str] | None = None) -> pa.PythonFile:
        """See `pyarrow.fs.FileSystemHandler`."""
        if self._client is None:
            return super().open_output_stream(path, metadata)
        begin = super().open_output_stream
        return pa.PythonFile(_SmallFirst(self._client, path, lambda: begin(path, metadata)), mode="w")


class _SmallFirst(RawIOBase):
    """A stream that keeps what is written until it is closed, or until there is too much of it."""

    def __init__(self, client: StoreClient, name: str, begin: Callable[[], Any]) -> None:
        super().__init__()
        self._client, self._name, self._begin = client, name, begin
        self._small = BytesIO()
        self._large: Any = None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return int(self._small.tell() if self._large is None else self._large.tell())

    def write(self, content: Any) -> int:
        size = len(memoryview(content).cast("B"))
        if self._large is None and self._small.tell() + size > _SMALL_BYTES:
            self._large = self._begin()
            self._large.write(self._small.getvalue())
            self._small = BytesIO()
        (self._small if self._large is None else self._large).write(content)
        return size

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        if self._large is not None:
            self._large.close()
        else:
            self._client.put(self._name, self._small.getvalue())


__all__ = ["LakeStorageHandler"]

"""Where a stream's lake is and how it is reached: paths of its tables, options of its store, its catalog, application ids.

No two tables share a folder, on any file system. Letters, digits, `_` and `-` of a name are kept, and each
other byte is escaped. Some file systems ignore case. So if a name differs only by case from that of a table
seen before, it gets its table's id as a suffix. The escape character is `~`, not `%`: delta-rs (1.6) decodes
percent signs in some places only, so it writes a table to `a%20b` and looks for it in `a b`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, get_args

from millstream.errors import LakeError, LakeUnavailable
from millstream.model.addresses import mask_address
from millstream.model.ids import StreamId, TableId
from millstream.model.option_flags import is_on
from millstream.model.positions import Seq
from millstream.model.schema import ReplicaIdentity, TableKind, TableSchema

View = Literal["current", "history", "scd2", "merged"]
VIEWS: Final = frozenset(get_args(View))

MESSAGES: Final = "_messages"
COMMITS: Final = "_commits"
BESIDE: Final = "~rebuild"
"""Suffix of the folder in which a table is rebuilt before it replaces the old one. No table's folder ends so."""
_PLAIN: Final = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
_NAMESAKE: Final = "~t"
"""Separator before a table's id. No escape looks like it: `t` is no hexadecimal digit."""
_FOLDER_ID: Final = re.compile(rf"{_NAMESAKE}[0-9]+\Z")
_FOLDER_BYTES_MAX: Final = 200
"""Maximum length in bytes of a folder name: file systems take 255, and engines add suffixes."""


def escape_part(part: str) -> str:
    """Return one part of a table's name, escaped for a folder name; distinct parts stay distinct."""
    return "".join(chr(byte) if byte in _PLAIN else f"~{byte:02x}" for byte in part.encode())


def folder_name(namespace: str, name: str, folder_id: TableId = TableId(0)) -> str:
    """Return `<schema>.<table>`, escaped, with `~t<id>` behind it unless the id is 0.

    A name too long for a file system ends in a hash of the whole.
    """
    folder = f"{escape_part(namespace)}.{escape_part(name)}"
    if len(folder) > _FOLDER_BYTES_MAX:
        digest = hashlib.sha256(folder.encode()).hexdigest()[:16]
        folder = f"{folder[: _FOLDER_BYTES_MAX - 18].rstrip('~')}~~{digest}"
    return f"{folder}{_NAMESAKE}{folder_id}" if folder_id else folder


def folders_in(folder: str) -> frozenset[str]:
    """Return the names of the folders in a folder, also of those that are links; none if it is missing."""
    try:
        with os.scandir(folder) as entries:
            return frozenset(entry.name for entry in entries if entry.is_dir())
    except OSError:
        return frozenset()


def is_folder_of(folder: str, namespace: str, name: str) -> bool:
    """Return whether a folder belongs to a table of that name, with or without an id as its suffix."""
    plain = folder_name(namespace, name)
    return folder == plain or folder.startswith(f"{plain}{_NAMESAKE}")


def is_plain_folder(folder: str) -> bool:
    """Whether a folder's name tells its table's name: it wasn't too long."""
    return "~~" not in folder


def name_in_folder(folder: str) -> tuple[str, str]:
    """Return the schema and the name of the table that has a plain folder (`is_plain_folder`)."""
    parts = _FOLDER_ID.sub("", folder).split(".", 1)
    raw = (re.sub(b"~([0-9a-f]{2})", lambda found: bytes([int(found[1], 16)]), part.encode()) for part in parts)
    namespace, name = (text.decode() for text in raw)
    return namespace, name


def folder_of(schema: TableSchema) -> str:
    """Return the folder of a table; logical messages have their own."""
    if schema.kind is TableKind.MESSAGES:
        return MESSAGES
    return folder_name(schema.namespace, schema.name, schema.folder_id)


def has_current(schema: TableSchema) -> bool:
    """Return whether a table has a current view; if not, it has history only.

    It needs rows that can be distinguished: by a key, or as whole rows under FULL.
    """
    if schema.kind is not TableKind.TABLE:
        return False
    return bool(schema.key) or schema.replica_identity is ReplicaIdentity.FULL


def without_rows(schema: TableSchema, stream: str) -> LakeError:
    """Return the error for a table without `has_current`; its message continues a sentence that begins with the name."""
    given = f"Write to another table, with a key in [streams.{stream}.keys]: a table keeps the key of its first rows."
    return LakeError(
        f'has no key: its records are in history."{schema.namespace}.{schema.name}"',
        hint=given if schema.source == 0 else "Give it a primary key or REPLICA IDENTITY FULL.",
    )


@dataclass(frozen=True, slots=True)
class LakeLayout:
    """One stream's part of a lake: an immutable, picklable value that is sent to executors."""

    location: str
    """Absolute folder, or URL of an object store's prefix, without the stream's name; `IN_CATALOG` if the catalog says where
    tables lie."""
    stream_name: str
    stream_id: StreamId
    pipeline: str = "lake"
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    patience_s: float = 10.0
    """Seconds in which a request to an object store is tried again; few, since delta-rs may hold the interpreter's lock."""
    format: Literal["delta", "iceberg"] = "delta"
    """The format of the tables."""
    catalog: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Properties of the catalog of an Iceberg lake, as pyiceberg takes them."""
    types: Mapping[str, str] = field(default_factory=dict)
    """The configuration's `[streams.S.types]`: a column's type in the lake, by `schema.table.column`."""

    @property
    def root(self) -> str:
        """Path of the stream's lake: `<location>/<stream>`."""
        return f"{self.location.rstrip('/')}/{self.stream_name}"

    def client_options(self, path: str) -> dict[str, str] | None:
        """Return the options for delta-rs's client of the object store at an address; None for a folder.

        Raises as `check_encrypted`.
        """
        if "://" not in path:
            return None
        self.check_encrypted()
        # Pauses double from 0.1 s to 15 s. The count of tries is no bound: a refused connection costs no time.
        retries = {
            "max_retries": "1000000",
            "retry_timeout": f"{self.patience_s:g}s",
            "backoff_config.init_backoff": "100ms",
            "backoff_config.max_backoff": "15s",
        }
        return dict(self.storage_options) | retries

    def check_encrypted(self) -> None:
        """Raise `LakeUnavailable` if the store's address isn't encrypted, and neither options nor environment allow that."""
        environ = os.environ if self.location.startswith("s3://") else {}
        endpoint, allowed = (
            self.storage_options.get(name) or environ.get(name, "") for name in ("AWS_ENDPOINT_URL", "AWS_ALLOW_HTTP")
        )
        if endpoint.startswith("http://") and not is_on(allowed):
            raise LakeUnavailable(
                f"{mask_address(self.location)}: requests to {mask_address(endpoint)} would go without TLS",
                hint='Name an address with https://, or set AWS_ALLOW_HTTP = "true" in [streams.S.lake.storage_options].',
                path=self.location,
            )

    def in_scratch(self, folder: str) -> LakeLayout:
        """Return a lake like this one, but in a folder of this machine."""
        catalog = {"type": "sql", "uri": f"sqlite:///{folder}/iceberg.db"} if self.catalog else {}
        return replace(self, location=folder, storage_options={}, catalog=catalog)

    @property
    def commits_path(self) -> str:
        """Path of the table of commit cuts."""
        return f"{self.root}/{COMMITS}"

    def table_path(self, view: View, schema: TableSchema) -> str:
        """Return the folder of one view of one table."""
        return f"{self.root}/{view}/{folder_of(schema)}"

    def app_id(self, view: View, table: TableId) -> str:
        """Return the application id of a view's commits, in Delta's `txn`; it is the same after a restart."""
        return f"millstream/{self.stream_id}/{self.pipeline}/{view}/{table}"

    @property
    def commits_app_id(self) -> str:
        """Application id of the commits of cuts."""
        return f"millstream/{self.stream_id}/{self.pipeline}/commits"


@dataclass(frozen=True, slots=True)
class TableCommit:
    """The result of a write: one view of one table has reached `n` in Delta version `version`."""

    table_id: TableId
    name: str
    """`schema.table`, each part quoted where PostgreSQL would."""
    folder: str
    """Last part of the table's path, by which `_commits` names it."""
    view: View
    version: int
    rows: int
    """Number of rows that this call wrote; 0 if all were there already."""
    n: Seq
    since: Seq = Seq(0)
    """In history: the position from which the table has had the folder's name.

    0 if another table has the name, or if the position is unknown."""

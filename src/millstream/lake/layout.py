"""Where a stream's lake tables lie, and the names under which they are committed.

Promises that no two tables share a folder, on any file system. Letters, digits, `_` and `-` of a name stand as they are, and
each other byte is escaped. A name that differs by case alone from the name of a table seen before gets its table's id as a
suffix, because some file systems ignore case. The escape character is `~`, not `%`: delta-rs (1.6) decodes percent signs in some
places only, so it writes a table to `a%20b` and looks for it in `a b`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from millstream.model.ids import StreamId, TableId
from millstream.model.positions import Seq
from millstream.model.schema import ReplicaIdentity, TableKind, TableSchema

View = Literal["current", "history", "scd2"]

MESSAGES: Final = "_messages"
COMMITS: Final = "_commits"
BESIDE: Final = "~rebuild"
"""Behind a folder's name: where its table is built anew, until it is put in its place. No table's folder is called so."""
_PLAIN: Final = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
_NAMESAKE: Final = "~t"
"""In front of a table's id. No escape looks so: `t` is no hexadecimal digit."""
_FOLDER_BYTES_MAX: Final = 200
"""File systems take 255; engines add suffixes of their own."""


def escape_part(part: str) -> str:
    """Return one part of a table's name as it stands in a folder name. Two parts never give one text."""
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


def is_folder_of(folder: str, namespace: str, name: str) -> bool:
    """Return whether a folder is the one of a table of that name, with an id behind it or without."""
    plain = folder_name(namespace, name)
    return folder == plain or folder.startswith(f"{plain}{_NAMESAKE}")


def folder_of(schema: TableSchema) -> str:
    """Return the folder of a table; logical messages have one of their own."""
    if schema.kind is TableKind.MESSAGES:
        return MESSAGES
    return folder_name(schema.namespace, schema.name, schema.folder_id)


def has_current(schema: TableSchema) -> bool:
    """Whether a table's rows can be told apart: by a key, or as whole rows under FULL; else it has history only."""
    if schema.kind is not TableKind.TABLE:
        return False
    return bool(schema.key) or schema.replica_identity is ReplicaIdentity.FULL


@dataclass(frozen=True, slots=True)
class LakeLayout:
    """One stream's part of a lake. A value: picklable, sent to executors."""

    location: str
    """A folder (absolute) or the URL of an object store's prefix; without the stream's name."""
    stream_name: str
    stream_id: StreamId
    pipeline: str = "lake"
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    types: Mapping[str, str] = field(default_factory=dict)
    """The configuration's `[streams.S.types]`: by `schema.table.column`, the type that a column has in the lake."""

    @property
    def root(self) -> str:
        """`<location>/<stream>`."""
        return f"{self.location.rstrip('/')}/{self.stream_name}"

    @property
    def commits_path(self) -> str:
        """The table of commit cuts."""
        return f"{self.root}/{COMMITS}"

    def table_path(self, view: View, schema: TableSchema) -> str:
        """The folder of one view of one table."""
        return f"{self.root}/{view}/{folder_of(schema)}"

    def app_id(self, view: View, table: TableId) -> str:
        """Who commits to a view of a table, in Delta's `txn`: nothing in it changes with a restart."""
        return f"millstream/{self.stream_id}/{self.pipeline}/{view}/{table}"

    @property
    def commits_app_id(self) -> str:
        """Who commits cuts."""
        return f"millstream/{self.stream_id}/{self.pipeline}/commits"


@dataclass(frozen=True, slots=True)
class TableCommit:
    """What a write left behind: one view of one table stands at `n` in Delta version `version`."""

    table_id: TableId
    name: str
    """`schema.table`, each part quoted where PostgreSQL would."""
    folder: str
    """The last part of the table's path: how `_commits` names it."""
    view: View
    version: int
    rows: int
    """Rows that this call wrote: 0 where all was there already."""
    n: Seq
    since: Seq = Seq(0)
    """Of history: from where on the table has borne the folder's name; 0 where another does, and where that isn't known."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, for executors' answers."""
        return {
            "table_id": int(self.table_id),
            "name": self.name,
            "folder": self.folder,
            "view": self.view,
            "version": self.version,
            "rows": self.rows,
            "n": int(self.n),
            "since": int(self.since),
        }

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> TableCommit:
        """The value that `as_dict` told."""
        return cls(
            table_id=TableId(facts["table_id"]),
            name=facts["name"],
            folder=facts["folder"],
            view=facts["view"],
            version=facts["version"],
            rows=facts["rows"],
            n=Seq(facts["n"]),
            since=Seq(facts["since"]),
        )

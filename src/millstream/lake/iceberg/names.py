"""Names of Iceberg tables, and the views that they are of: made from a table's folder, which no other table has.

A name has lower-case letters, digits and `_` alone, because catalogs and engines differ in the rest. If that loses
something of the source's name, the name ends in a hash of it. So it never depends on the other tables of the lake.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from millstream.lake.layout import BESIDE, MESSAGES, VIEWS, LakeLayout, is_plain_folder, name_in_folder

_OTHER: Final = re.compile(r"[^a-z0-9_]")
_VIEWS: Final = VIEWS | {"regions"}
"""The views, and the state of `merged`."""


def identifier_of(layout: LakeLayout, path: str) -> tuple[str, str]:
    """Return the namespace and the name of the table whose folder is at `path`."""
    namespace, within = namespace_of(layout, path)
    folder = within.removeprefix("/")
    return namespace, folder if path == layout.commits_path else table_name(folder.removesuffix(BESIDE))


def namespace_of(layout: LakeLayout, path: str) -> tuple[str, str]:
    """Return the namespace of a folder of the lake, and the folder's path within the namespace's own, with a slash in front.

    A view's tables have a namespace of their own, and so have those that a rebuild makes. All else is in the stream's.
    """
    stream, within = (
        _OTHER.sub("_", layout.stream_name),
        path.removeprefix(layout.root) if path != layout.location else "",
    )
    view, slash, folder = within.removeprefix("/").partition("/")
    if folder.endswith(BESIDE):
        return f"{stream}_building", slash + folder
    return (f"{stream}_{view}", slash + folder) if view in _VIEWS else (stream, within)


def namespaces_of(layout: LakeLayout) -> tuple[str, ...]:
    """Return the namespaces of a stream's tables: its own first, then those of the views and of rebuilds."""
    stream = _OTHER.sub("_", layout.stream_name)
    return (stream, *(f"{stream}_{view}" for view in sorted(_VIEWS)), f"{stream}_building")


def view_of(layout: LakeLayout, path: str) -> str:
    """Return the view that a table's folder belongs to; `commits` for the table of cuts."""
    return "commits" if path == layout.commits_path else path.rsplit("/", 2)[1]


def table_name(folder: str) -> str:
    """Return the name of the table that has a folder."""
    if folder == MESSAGES:
        return folder
    if not is_plain_folder(folder):
        return f"{_OTHER.sub('_', folder)}_{_digest(folder)}"  # too long a name to be read from its folder
    namespace, name = name_in_folder(folder)
    plain = f"{_OTHER.sub('_', namespace)}__{_OTHER.sub('_', name)}"
    is_lost = any(_OTHER.search(part) or "__" in part for part in (namespace, name))
    if is_lost or namespace.endswith("_") or name.startswith("_"):
        return f"{plain}_{_digest(f'{namespace}.{name}')}"
    return plain


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]

"""Mistakes in where a lake of files lies: the address's scheme, and the names of its store's options.

A misspelt option would be ignored by the libraries that receive it, and keys of another account be used.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Final

from millstream.config.model import LakeConfig
from millstream.config.rule_checks import Clash
from millstream.config.toml_lines import KeyPath

OPTIONS: Final = {
    "s3": (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_REGION",
        "AWS_ENDPOINT_URL",
        "AWS_ALLOW_HTTP",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST",
        "AWS_PROFILE",
    ),
}
"""The options of each store in which tests put a lake, by the scheme of its addresses."""


def clashes_of_storage(at: KeyPath, lake: LakeConfig) -> Iterator[Clash]:
    """Yield each mistake of a stream's `lake.location` and `lake.storage_options`."""
    if lake.format == "postgres":
        return
    scheme, separator, _ = lake.location.partition("://")
    if separator and scheme not in OPTIONS:
        yield (*at, "lake", "location"), "lake_scheme_unsupported", unsupported(scheme)
        return
    # The options may stay while a lake lies in a folder.
    allowed = OPTIONS[scheme] if separator else [name for names in OPTIONS.values() for name in names]
    for name in lake.storage_options:
        if name not in allowed:
            (nearest,) = difflib.get_close_matches(_spelled(name), allowed, n=1, cutoff=0.0)
            yield (
                (*at, "lake", "storage_options", name),
                "storage_option_unknown",
                f"unknown option; did you mean {nearest}? allowed here: {', '.join(allowed)}",
            )


def unsupported(scheme: str) -> str:
    """Return why a lake can't lie at addresses with a scheme."""
    stores = " or ".join(f"{name}://bucket/folder" for name in OPTIONS)
    return f"a lake can't lie at {scheme}://…, in which it isn't tested: name a folder, or {stores}"


def _spelled(name: str) -> str:
    """Return an option's name as this file spells them, for names of other libraries."""
    name = name.upper().replace("-", "_").replace(".", "_")
    return name if name.startswith(("AWS_", "AZURE_", "GOOGLE_")) else f"AWS_{name}"

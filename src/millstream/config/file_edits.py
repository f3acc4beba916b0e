"""Changes of single keys in `millstream.toml` by commands; comments and everything else stay as they are."""

from __future__ import annotations

import json
import re
from typing import Final

from millstream.config.toml_lines import key_lines

_VALUE: Final = re.compile(r"""(?P<key>[^=\n]*=\s*)(?:"(?:\\.|[^"\\\n])*"|'[^'\n]*')""")


def with_location(text: str, stream: str, location: str) -> str | None:
    """Return a configuration's text with another `location` of a stream's lake; None if it is written in another way.

    Args:
        text: of the file; a valid configuration.
    """
    lines, places = text.splitlines(keepends=True), key_lines(text)
    section, quoted = ("streams", stream, "lake"), json.dumps(location, ensure_ascii=False)
    at = places.get((*section, "location"))
    if at is not None:
        found = _VALUE.match(lines[at - 1])
        if found is None:
            return None
        lines[at - 1] = f"{found['key']}{quoted}{lines[at - 1][found.end() :]}"
        return "".join(lines)
    header = places.get(section)
    if header is None:
        end = "" if text.endswith("\n") or not text else "\n"
        return f"{text}{end}\n[streams.{stream}.lake]\nlocation = {quoted}\n"
    if not lines[header - 1].lstrip().startswith("["):
        return None
    lines.insert(header, f"location = {quoted}\n")
    return "".join(lines)

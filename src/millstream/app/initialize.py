"""`init`: a new home's `millstream.toml`, with comments, and without the password."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from millstream.app.config.file import FILE_NAME
from millstream.errors import HomeUnwritable, UsageError
from millstream.model.ids import check_stream_name
from millstream.model.names import TablePatterns

_URL_PASSWORD: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://[^/?#@:]*:)([^/?#]*)(@)")
_QUERY_PASSWORD: Final = re.compile(r"([?&]password=)([^&#]*)()")
_KEYWORD_PASSWORD: Final = re.compile(r"(\bpassword\s*=\s*)('(?:\\.|[^'\\])*'|(?:\\.|\S)+)()")

_SOURCE: Final = """\
[streams.{stream}.source]
{export}dsn = {dsn}
tables = {tables}    # "!" in front leaves out: "!public.audit_*"
# publication = "millstream_{stream}"    # made if missing, where the role may
# slot = "millstream_{stream}"
# copy_workers = 2    # connections that copy existing rows side by side
# copy_rate = "20MiB" # bytes a second that they may read together; taken while capture runs
# catch_up = "auto"    # a large backlog is read in chunks where that is faster; "never", "always"
"""

_TEMPLATE: Final = """\
# A home of Millstream's. `millstream config show` prints every key with its value and where that came from.
# ${{NAME}} in any string is taken from the environment.

{source}
# [streams.{stream}.ingest]
# schema_on_write = "create"    # what rows that applications append may change: "strict" nothing, "add_columns", "create" tables too

# [streams.{stream}.keys]    # columns that tell rows apart of tables that applications write: they get a current table
# "public.clicks" = ["id"]

[streams.{stream}.lake]
format = "delta"
location = "lake"    # a folder, from here; or the URL of an object store, with [streams.{stream}.lake.storage_options]
# views = ["current", "history"]    # and "scd2": every version of each row, with the time at which it began and ended
# history_retention = "90d"    # whole days of history older than this go, once current has them; unset: kept for ever

# [streams.{stream}.types]    # numeric columns without a precision are text in the lake, unless they stand here
# "public.orders.total" = "decimal(38,9)"

# [streams.{stream}.log]
# retention_age = "7d"    # the log keeps what the lake has for so long
# retention_bytes = "20%"    # … and takes at most this much of the disk
# retention_bytes_max = "40%"    # a consumer that holds more of it back is cut off

# [spark]
# master = "local[*]"
# trigger_interval = "500ms"
# [spark.conf]
# "spark.driver.memory" = "1g"

# [http]
# listen = "127.0.0.1:8787"

# [catalog]
# url = "data/catalog.db"    # embedded; or a PostgreSQL database, which several homes may share: postgresql://…
"""


@dataclass(frozen=True, slots=True)
class NewHome:
    """What `init` has made."""

    file: Path
    variable: str | None
    """The environment variable that the file takes the password from; None where the DSN had none."""
    environ: Mapping[str, str]
    """That variable with the password: what this process needs to use the file at once."""


def make_home(folder: Path, *, stream: str, source: str | None, tables: Sequence[str]) -> NewHome:
    """Write `millstream.toml` into a folder, which is made where it isn't there.

    Args:
        folder: the home.
        stream: the stream's name.
        source: a DSN; its password goes into the environment, not into the file. None: the stream has what applications append.
        tables: patterns, of a source.

    Raises:
        UsageError: the folder holds a configuration already, or a name or a pattern is none.
        HomeUnwritable: the folder can't be written.
    """
    check_stream_name(stream)
    TablePatterns.parse(tables)
    variable, password = f"{stream.upper()}_PASSWORD", None
    if source is None:
        section = f"[streams.{stream}]    # no source: it has what applications append\n"
    else:
        dsn, password = take_password(source, variable)
        section = _SOURCE.format(
            stream=stream,
            dsn=_quoted(dsn),
            tables="[" + ", ".join(map(_quoted, tables)) + "]",
            export="" if password is None else f"# before a command: export {variable}=…    (the password, as it is)\n",
        )
    text = _TEMPLATE.format(stream=stream, source=section)
    file = folder / FILE_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as output:
            output.write(text)
    except FileExistsError as error:
        raise UsageError(
            f"{file} is there already; nothing was changed", hint="Edit it, or name another folder.", file=str(file)
        ) from error
    except OSError as error:
        raise HomeUnwritable(f"{error.filename or folder}: {error.strerror}", path=str(folder)) from error
    environ = {**os.environ} if password is None else {**os.environ, variable: password}
    return NewHome(file, None if password is None else variable, environ)


def take_password(dsn: str, variable: str) -> tuple[str, str | None]:
    """The DSN with `${variable}` in place of its password, and the password as it is; None where it has none.

    A password that is a variable already stays.
    """
    is_url = "://" in dsn
    for pattern in (_URL_PASSWORD, _QUERY_PASSWORD) if is_url else (_KEYWORD_PASSWORD,):
        found = pattern.search(dsn)
        if found is None or not found[2] or "${" in found[2]:
            continue
        if pattern is _QUERY_PASSWORD:
            # A variable in a query isn't escaped for it: better that the user is asked than that it's wrong.
            head, tail = dsn[: found.start()], dsn[found.end() :]
            rest = head + (found[1][0] + tail[1:] if tail.startswith("&") else tail)
            user = re.sub(r"(://[^/?#@:]*)(@)", rf"\g<1>:${{{variable}}}\g<2>", rest, count=1)
            return (user, unquote(found[2])) if user != rest else (dsn.replace(found[2], f"${{{variable}}}"), found[2])
        password = unquote(found[2]) if is_url else _unquoted(found[2])
        return dsn[: found.start(2)] + f"${{{variable}}}" + dsn[found.end(2) :], password
    return dsn, None


def _unquoted(value: str) -> str:
    inner = value[1:-1] if value.startswith("'") else value
    return re.sub(r"\\(.)", r"\1", inner)


def _quoted(text: str) -> str:
    """A TOML basic string."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")

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

from millstream.config.file import FILE_NAME
from millstream.config.stream_checks import fault_of_location
from millstream.errors import ConfigError, MillstreamError, UsageError
from millstream.libpq import ADDRESS_HINT, is_address
from millstream.model.addresses import (
    MASK,
    UrlParts,
    is_secret_key,
    mask_address,
    query_pairs,
    split_keywords,
    split_url,
)
from millstream.model.ids import check_stream_name
from millstream.model.names import TablePatterns
from millstream.private_files import make_folder, open_private

_VARIABLE: Final = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_MAY_STAND: Final = frozenset({"password", "options", "oauth_client_id", "oauth_issuer", "oauth_scope"})
"""Secret-looking keywords that may stay: the password is taken out, and the others are no secrets."""
_HOW: Final = (
    "%-encode special characters in user and password (@ is %40, / is %2F, : is %3A), or leave the password out and name the "
    "variable that holds it: --password-env NAME."
)
_STRING: Final = re.compile(r"""^[^#\n]*?=\s*["'](.*)["']""", re.MULTILINE)

_SOURCE: Final = """\
[streams.{stream}.source]
{export}dsn = {dsn}
tables = {tables}    # "!" in front leaves out: "!public.audit_*"
# publication = "millstream_{stream}"    # made if missing, where the role may
# slot = "millstream_{stream}"
# copy_workers = 2    # connections that copy existing rows side by side
# copy_rate = "20MiB" # bytes a second that they may read together; taken while capture runs
# copy_again_above = "10GiB"    # a larger table whose definition changed is copied again by `tables copy` alone
# catch_up = "auto"    # a large backlog is read in chunks where that is faster; "never", "always"
"""

_STORAGE: Final = """
# [streams.{stream}.lake.storage_options]    # without these: from the environment, or the role of this machine
# AWS_REGION = "eu-central-1"
# AWS_ACCESS_KEY_ID = "${{AWS_ACCESS_KEY_ID}}"
# AWS_SECRET_ACCESS_KEY = "${{AWS_SECRET_ACCESS_KEY}}"
# AWS_ENDPOINT_URL = "https://store.example.com"    # of another store than Amazon's
"""
_REST: Final = """
[streams.{stream}.lake.catalog]
type = "rest"
uri = {uri}
# warehouse = "shop"    # the server's word for it
# credential = "${{CATALOG_CREDENTIAL}}"    # client:secret; or token
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
format = {lake_format}
{location}    # a folder, from here; or the URL of an object store: s3://bucket/folder
# views = ["current", "history"]    # and "scd2": every version of each row, with the time at which it began and ended;
#                                   # "merged": the rows of all regions
# history_retention = "90d"    # whole days of history older than this go, once current has them; unset: kept for ever
{storage}
# [streams.{stream}.types]    # numeric columns without a precision are text in the lake, unless they stand here
# "public.orders.total" = "decimal(38,9)"

# [streams.{stream}.log]
# retention_age = "7d"    # the log keeps what the lake has for so long
# retention_bytes = "20%"    # … and takes at most this much of the disk
# retention_bytes_max = "40%"    # a follower or a consumer that holds more of it back is cut off

# [streams.{stream}.consumers.search]    # a named reader of the stream, for applications that react to changes
# tables = ["public.products"]
# where = "price > 0"
# start = "earliest"

# [spark]
# master = "local[*]"
# trigger_interval = "500ms"    # "auto": a batch waits as long as the last one took, for many tables with few changes
# [spark.conf]
# "spark.driver.memory" = "1g"

# [http]
# listen = "127.0.0.1:8787"

# [alerts]
# url = "https://ops.example.com/millstream"    # gets slot lag, quarantined tables, stalled parts and consumers, and silence
# secret = "${{MILLSTREAM_ALERTS_SECRET}}"

# [catalog]
# url = "data/catalog.db"    # embedded; or a PostgreSQL database, which several homes may share: postgresql://…
"""


@dataclass(frozen=True, slots=True)
class NewHome:
    """The result of `init`."""

    file: Path
    variable: str | None
    """The environment variable that the file takes the password from; None without a password."""
    environ: Mapping[str, str]
    """That variable with the password, so that this process can use the file at once."""


def make_home(
    folder: Path,
    *,
    stream: str,
    source: str | None,
    tables: Sequence[str],
    password_env: str | None = None,
    lake_format: str = "delta",
    location: str | None = None,
    catalog: str | None = None,
) -> NewHome:
    """Write `millstream.toml` into a folder, which is made if it doesn't exist.

    Args:
        source: a DSN; its password goes into the environment, not into the file. None: the stream takes
            applications' appends.
        password_env: the environment variable that holds the password, for a DSN without one.
        location: where the lake's tables lie: a folder, from the home, or the URL of an object store. None: `lake`, or
            where the catalog says, if it is a server.
        catalog: the catalog of Iceberg tables, `sql` or `rest=URI`; None: as `sql`.

    Raises:
        ConfigError (`lake_scheme_unsupported`): the location is in a kind of store in which lakes aren't tested.
        ConfigError: the location is in a store, and names no bucket.
        UsageError: the folder has a configuration already; a name or a pattern is invalid; the DSN is invalid or
            ambiguous; the location has a secret in it; or the catalog isn't one of these.
        MillstreamError (`home_unwritable`): the folder can't be written.
    """
    check_stream_name(stream)
    TablePatterns.parse(tables)
    server = _catalog_server(catalog, lake_format)
    place = location or "lake"
    if mask_address(place) != place:
        raise UsageError(
            "--location is neither a folder nor the URL of an object store, or has a user, a password or a key in it",
            hint="Leave the keys out: they belong into [streams.S.lake.storage_options], or the environment.",
        )
    if (fault := fault_of_location(place, stream, folder)) is not None:
        raise ConfigError(f"--location: {fault[1]}", code=fault[0])
    variable, password, has_variable = f"{stream.upper()}_PASSWORD", None, False
    if source is None:
        section = f"[streams.{stream}]    # no source: it has what applications append\n"
    else:
        if password_env is None:
            dsn, password = take_password(source, variable)
        else:
            dsn, variable = name_password(source, password_env), password_env
        has_variable = password is not None or password_env is not None
        section = _SOURCE.format(
            stream=stream,
            dsn=_quoted(dsn),
            tables="[" + ", ".join(map(_quoted, tables)) + "]",
            export="" if not has_variable else f"# before a command: export {variable}=…    (the password, as it is)\n",
        )
    storage = _STORAGE.format(stream=stream) if "://" in place else ""
    if server is not None:
        storage += _REST.format(stream=stream, uri=_quoted(server))
    placed = f"location = {_quoted(place)}"
    if server is not None and location is None:
        placed = f"# {placed}    # without it, tables lie where the catalog says"
    text = _TEMPLATE.format(
        stream=stream, source=section, lake_format=_quoted(lake_format), location=placed, storage=storage
    )
    file = folder / FILE_NAME
    try:
        make_folder(folder)
    except NotADirectoryError as error:
        raise MillstreamError(
            f"{error.filename or folder}: is not a folder",
            code="home_unwritable",
            hint="Name another folder, or move what is there away.",
            path=str(folder),
        ) from error
    except OSError as error:
        raise _error_of_os(error, folder) from error
    is_begun = False
    try:
        # A user may write a password into it later.
        with open(file, "x", encoding="utf-8", opener=open_private) as output:
            is_begun = True
            output.write(text)
    except FileExistsError as error:
        raise UsageError(
            f"{file} is there already; nothing was changed", hint="Edit it, or name another folder.", file=str(file)
        ) from error
    except OSError as error:
        if is_begun:  # a part of it would keep the next `init` from writing it
            file.unlink(missing_ok=True)
        raise _error_of_os(error, file) from error
    environ = {**os.environ} if password is None else {**os.environ, variable: password}
    return NewHome(file, variable if has_variable else None, environ)


def _error_of_os(error: OSError, path: Path) -> MillstreamError:
    from millstream.wal.files import error_of_os, naming

    return error_of_os(naming(error, str(path)))


def _catalog_server(catalog: str | None, lake_format: str) -> str | None:
    """Return the address of a REST catalog that an option names; None if it names none."""
    if catalog is None:
        return None
    if lake_format != "iceberg":
        raise UsageError("--catalog is for --lake iceberg: other tables have no catalog")
    kind, _, uri = catalog.partition("=")
    if catalog == "sql":
        return None
    if kind != "rest" or not uri.startswith(("http://", "https://")):
        raise UsageError(
            "--catalog is neither sql nor rest=URI",
            hint="Name the server's address: --catalog rest=https://catalog.example.com",
        )
    if mask_address(uri) != uri:
        raise UsageError(
            "--catalog has a user, a password or a key in its address",
            hint="Leave it out: `credential` or `token` belong into [streams.S.lake.catalog], as a variable.",
        )
    return uri


def take_password(dsn: str, variable: str) -> tuple[str, str | None]:
    """Return the DSN with `${variable}` in place of its password, and the password; None if it has none.

    A password that is a variable already stays.

    Raises:
        UsageError: the DSN is no address of PostgreSQL, or the end of its password is ambiguous; or it
            has another secret, too.
    """
    found = _Dsn.read(dsn)
    if not found.passwords or _VARIABLE.search(found.passwords[0]):
        return dsn, None
    return found.with_password(f"${{{variable}}}"), found.passwords[0]


def holds_password(text: str) -> bool:
    """Return whether an address in a configuration's text has a literal password instead of a variable."""
    for match in _STRING.finditer(text):
        plain = _VARIABLE.sub("", match[1])
        url = split_url(plain)
        if url is not None and url.password:
            return True
        if any(pair.key == "password" and pair.value for pair in split_keywords(plain) or ()):
            return True
    return False


def name_password(dsn: str, variable: str) -> str:
    """Return a DSN with `${variable}` added as its password.

    Raises `UsageError` as `take_password`, and if it has one.
    """
    if _NAME.match(variable) is None:
        raise UsageError(
            f"{variable!r} is no name of an environment variable", hint="Give --password-env letters, digits and _."
        )
    found = _Dsn.read(dsn)
    if found.passwords:
        raise UsageError(
            "--password-env names the password's variable, and --source has a password, too",
            hint="Leave the password out of --source.",
        )
    return found.with_password(f"${{{variable}}}")


@dataclass(frozen=True, slots=True)
class _Dsn:
    """A DSN that can be read in one way only."""

    url: UrlParts | None
    """The URL; None: the DSN is in keyword form."""
    pairs: list[tuple[str, str]]
    """As in a URL's query; values of keywords are without quotes."""
    text: str
    passwords: list[str]
    """The password as written, if there is one."""

    @classmethod
    def read(cls, dsn: str) -> _Dsn:
        text = dsn.strip()
        # A variable may occur anywhere, also in places where its braces aren't valid.
        plain = _VARIABLE.sub("variable", text)
        if not is_address(text):
            raise UsageError("--source is no address of a PostgreSQL database", hint=ADDRESS_HINT)
        if mask_address(plain) == MASK:
            raise UsageError(
                "the address in --source can't be parsed, or is ambiguous: the end of its password can't be found",
                hint=_HOW,
            )
        url = split_url(text) or split_url(plain)
        if url is not None:
            pairs = query_pairs(url.query) or []
            written = [url.password] if url.password else []
            written += [value for key, value in pairs if key == "password" and value]
            passwords = list(map(unquote, written))
            if any(re.search(r"%(?![0-9A-Fa-f]{2})", password) for password in written):
                raise UsageError("the password in --source has a % without two hex digits behind it", hint=_HOW)
        else:
            pairs = [(pair.key, pair.value) for pair in split_keywords(text) or []]
            passwords = [value for key, value in pairs if key == "password" and value]
        for key, value in pairs:
            if is_secret_key(key) and key not in _MAY_STAND and value and not _VARIABLE.search(value):
                raise UsageError(
                    f"{key} in --source is a secret, and would be written to the file",
                    hint=f"Write a variable for it: {key}=${{NAME}}.",
                )
        if len(passwords) > 1:
            raise UsageError("--source has more than one password", hint="Leave one of them.")
        return cls(url, pairs, text, passwords)

    def with_password(self, variable: str) -> str:
        """Return the DSN with that in place of its password, or added to it."""
        if self.url is not None:
            # A variable in a query isn't escaped for it; before the @ it is.
            query = "&".join(f"{key}={value}" for key, value in self.pairs if key != "password")
            query = f"?{query}" if query else ""
            return self.url._replace(user=self.url.user or "", password=variable, query=query).text()
        for pair in split_keywords(self.text) or ():
            if pair.key == "password":
                return self.text[: pair.start] + variable + self.text[pair.end :]
        return f"{self.text} password={variable}"


def _quoted(text: str) -> str:
    """Return a TOML basic string."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")

"""Parse libpq addresses of PostgreSQL servers, show them without their secrets, and bound how long connecting takes.

Every room that connects to a server uses it (capture for its source, the catalog for its database)
and raises its own errors for the faults reported here. Nothing in this module connects.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import psycopg

from millstream.model.addresses import mask_option, split_url

CONNECT_TIMEOUT_S: Final = 10
ADDRESS_HINT: Final = (
    "Write it as postgresql://user@host:5432/database; %-encode special characters in user and password (@ is %40, / is %2F), or take "
    "them from the environment: postgresql://user:${PASSWORD}@host/database."
)
CHANGED_LOGIN_HINT: Final = (
    "After a password was changed in millstream.toml or in a variable of the environment, restart Millstream, which reads both at its "
    "start; ~/.pgpass is read at every connection."
)

# Every transaction that may write begins with this. Under a role's or database's stricter default
# isolation, concurrent transactions would fail, and one would see the state at its start instead of
# the current state. A default of read only is respected.
BEGIN: Final = "BEGIN ISOLATION LEVEL READ COMMITTED NOT DEFERRABLE"

# Settings of a session in which the text of a value never depends on a role's or a database's
# settings. Nothing cuts a long COPY short or silently filters its rows: with row_security off, a
# policy that would hide rows raises an error. Transactions that name no isolation run as `BEGIN`
# sets it.
_PINNED: Final = {
    "client_encoding": "'UTF8'",
    "datestyle": "'ISO, MDY'",
    "timezone": "'UTC'",
    "intervalstyle": "'postgres'",
    "extra_float_digits": "3",
    "bytea_output": "'hex'",
    "lc_monetary": "'C'",
    "search_path": "pg_catalog",
    "default_transaction_isolation": "'read committed'",
    "default_transaction_deferrable": "off",
    "standard_conforming_strings": "on",
    "quote_all_identifiers": "off",
    "row_security": "off",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
}

_URL: Final = re.compile(r"postgres(ql)?://")
_KEYWORDS: Final = re.compile(r"\s*[a-z_]+\s*=")
_FAULTS: Final = (
    ('missing "="', 'a keyword has no "=" and value'),
    ("unterminated quoted string", "a quote isn't closed"),
    ("invalid connection option", "it has a keyword that libpq doesn't know"),
    ("invalid URI query parameter", "it has a keyword that libpq doesn't know"),
    ("key/value separator", "its query isn't made of key=value"),
    ("percent-encoded", "a % isn't followed by two hexadecimal digits"),
    ("IPv6", "its IPv6 address isn't closed"),
)


def is_address(text: str) -> bool:
    """Whether a text is an address, in URL or in keyword form, and not a path."""
    return _URL.match(text) is not None or ("://" not in text and _KEYWORDS.match(text) is not None)


def parse_address(address: str) -> dict[str, Any]:
    """Return the parameters of an address.

    Raises:
        ValueError: the text is no address; the message names the fault, never the address itself.
    """
    import psycopg
    from psycopg import conninfo

    try:
        parameters = dict(conninfo.conninfo_to_dict(address))
    except psycopg.Error as error:
        fault = next((words for said, words in _FAULTS if said in str(error)), "its syntax is wrong")
        # libpq quotes the text it failed on, which may be a part of a password. Neither its message
        # nor the error itself is passed on.
        raise ValueError(f"can't be parsed: {fault}") from None
    if not all(port.isdecimal() for port in str(parameters.get("port") or 5432).split(",") if port):
        raise ValueError("has a port that isn't a number")
    # libpq ends a password at the first `@` or `/`, and an unquoted value at the first space. The
    # rest would be taken for host, port or database, and be shown as such.
    if "://" in address and split_url(address.strip()) is None:
        raise ValueError("can be read in two ways: %-encode @, /, ?, # and spaces in it")
    if any(set("@=") & set(str(parameters.get(name, ""))) for name in ("host", "hostaddr")) or (
        "://" not in address and any("=" in str(parameters.get(name, "")) for name in ("dbname", "user"))
    ):
        raise ValueError("has a host, database or user with = or @ in it: is a space missing in front of a keyword?")
    return parameters


def database_of(address: str) -> str:
    """Return the name of an address's database, as libpq chooses it; empty if a service decides.

    Raises:
        ValueError: the text is no address.
    """
    parameters = parse_address(address)
    return str(parameters.get("dbname") or ("" if "service" in parameters else parameters.get("user") or ""))


def describe_parameters(parameters: dict[str, Any]) -> str:
    """Describe the target without its secrets: `host:port/database`, or the service's name.

    A part that holds what looks like a password, as by a missing `?`, is masked.
    """
    if "service" in parameters and not {"host", "hostaddr", "dbname"} & parameters.keys():
        return f"service {parameters['service']}"
    host = parameters.get("host") or parameters.get("hostaddr") or "the default socket"
    database = parameters.get("dbname", parameters.get("user", ""))
    return f"{mask_option('host', host)}:{parameters.get('port', 5432)}/{mask_option('dbname', database)}"


def with_patience(parameters: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the parameters with an `application_name` and, unless already set, timeouts for connecting and silence."""
    # A peer that vanishes silently is noticed after about half a minute, not after two hours.
    bounds = {
        "connect_timeout": CONNECT_TIMEOUT_S,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 4,
    }
    return bounds | parameters | {"application_name": name}


def pinned_session(**more: str) -> str:
    """Return the statements, as one text, that pin a session: no role's or database's setting changes values' texts.

    Args:
        more: settings that the caller adds or changes, as they stand in SQL.
    """
    return "; ".join(f"SET {name} = {value}" for name, value in (_PINNED | more).items())


def fetch_row(
    connection: psycopg.Connection[tuple[Any, ...]], statement: str, *arguments: object
) -> tuple[Any, ...] | None:
    """Execute a statement as a transaction of its own, in one round trip, and return its first row.

    The isolation level is part of the statement text. So it also holds behind a pooler, which may
    use another session than the one that was set up.

    Args:
        connection: in autocommit.
        statement: one, with `{}` for each argument.
        arguments: inserted as literals.

    Raises:
        psycopg.Error: the connection is unusable afterwards.
    """
    from psycopg import sql

    with connection.cursor() as cursor:
        cursor.execute(sql.SQL(f"{BEGIN}; {statement}; COMMIT").format(*map(sql.Literal, arguments)))
        cursor.nextset()
        return cursor.fetchone()


def one_line(error: BaseException) -> str:
    """Join libpq's message, whose hints stand on lines of their own, into one line."""
    return "; ".join(" ".join(line.split()) for line in str(error).splitlines() if line.strip())
